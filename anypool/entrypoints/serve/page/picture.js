// A picture in place of a text: chosen, dropped or pasted.

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** Makes a view take pictures. While there is one, the document's text is put aside. */
export function takePictures(section) {
  const form = section.querySelector("form");
  const { picture, document: text } = form.elements;
  const field = picture.closest(".field");
  const remove = field.querySelector("button");

  function changed() {
    const hasPicture = picture.files.length > 0;
    text.disabled = hasPicture;
    remove.hidden = !hasPicture;
  }

  function take(event, { files }) {
    if (field.hidden || section.hidden) return;
    const file = [...files].find((one) => KINDS.includes(one.type));
    if (!file) return;
    event.preventDefault();
    const one = new DataTransfer();
    one.items.add(file);
    picture.files = one.files;
    changed();
  }

  picture.addEventListener("change", changed);
  remove.addEventListener("click", () => {
    picture.value = "";
    changed();
  });
  form.addEventListener("dragover", (event) => {
    if (!field.hidden && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  form.addEventListener("drop", (event) => take(event, event.dataTransfer));
  document.addEventListener("paste", (event) => take(event, event.clipboardData));
}

/** A picture as the content of a message. */
export async function contentOf(file) {
  const reader = new FileReader();
  await new Promise((resolve, reject) => {
    reader.addEventListener("load", resolve);
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
  return [{ type: "image_url", image_url: { url: reader.result } }];
}
