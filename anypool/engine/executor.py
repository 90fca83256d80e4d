"""What runs the engine's batches: this process alone, or the ranks that share a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anypool.errors import EngineDeadError
from anypool.model_executor.pooling_model_runner import Launched, PoolingModelRunner, RunnerOutput
from anypool.model_executor.rank import Rank, Work
from anypool.model_executor.weights.lora import PeftAdapter


class InFlight(Protocol):
    """A forward pass on its way."""

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> RunnerOutput:
        """The results, once they are there.

        Raises:
            Exception: What the model or the device raised.
        """


class Executor(Protocol):
    """Runs forward passes, in the order of their launches.

    Attributes:
        depth: How many may be on their way at once.
        calls_back: Whether it says when one is done. If not, `result` is how to wait for it.
    """

    depth: int
    calls_back: bool

    def watch(self, on_done: Callable[[], None], on_death: Callable[[EngineDeadError], None]) -> None:
        """Says whom to call, in any thread, when a pass is done, and when nothing can be run any more."""

    def launch(self, work: Work) -> InFlight:
        """Launches one, or raises what the model raised."""

    def put_adapter(self, slot: int, adapter: PeftAdapter) -> None:
        """Has the other processes put a LoRA adapter into a slot, before what is launched next."""

    def forget_chunks(self) -> None:
        """Frees what a long prompt left that will not be run to its end."""

    def free_memory(self) -> None:
        """Gives back what can be made again, after memory was short."""

    def close(self) -> None:
        """Ends whatever the executor started, on the thread that launches."""

    def kill(self) -> None:
        """The same by force, from any thread."""


class LocalExecutor:
    """One process with one device. A GPU runs a batch while the next one is packed and copied.

    Args:
        runner: Of the model.
    """

    calls_back = False

    def __init__(self, runner: PoolingModelRunner) -> None:
        self.runner = runner
        self.depth = 1 if runner.device.type == "cpu" else 2
        self._rank = Rank(runner)

    def watch(self, on_done: Callable[[], None], on_death: Callable[[EngineDeadError], None]) -> None:
        pass  # `result` waits, and this process dies as a whole

    def launch(self, work: Work) -> Launched:
        launched = self._rank.launch(work)
        assert launched is not None
        return launched

    def put_adapter(self, slot: int, adapter: PeftAdapter) -> None:
        pass  # there are none

    def forget_chunks(self) -> None:
        self._rank.forget_chunks()

    def free_memory(self) -> None:
        self.runner.free_memory()

    def close(self) -> None:
        self.forget_chunks()

    def kill(self) -> None:
        pass
