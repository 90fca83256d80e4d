// The API key that the user types. It stays in this tab, and is gone when the tab is closed.

const NAME = "anypool-api-key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const forget = document.getElementById("forget");
let asking = null;

export function storedKey() {
  return sessionStorage.getItem(NAME) ?? "";
}

/**
 * Asks for a key. Calls that are refused at the same time share one question, and one whose key has been replaced since
 * it was sent asks nothing.
 * @throws {Error} The user gives none.
 */
export async function askForKey(reason, refused) {
  if (!asking && storedKey() !== refused) return;
  asking ??= ask(reason).finally(() => (asking = null));
  await asking;
}

function ask(reason) {
  document.getElementById("key-reason").textContent = reason;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "given") {
        reject(new Error("The server wants an API key."));
        return;
      }
      sessionStorage.setItem(NAME, field.value.trim());
      field.value = "";
      showForget();
      resolve();
    }, { once: true });
  });
}

function showForget() {
  forget.hidden = !storedKey();
}

dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  dialog.close("given");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close(""));
forget.addEventListener("click", () => {
  sessionStorage.removeItem(NAME);
  location.reload();
});
showForget();
