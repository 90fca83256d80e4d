"""How people reach the engine: Python, the command line, HTTP."""
