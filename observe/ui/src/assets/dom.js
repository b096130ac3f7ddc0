// Elements of the page. Names of the cluster are others' words: they become text, never HTML.

/** Returns the page's element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Makes an element with properties, data and children, which are elements or texts. */
export function make(tag, { data = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

/** Writes a text only if it differs, so that nothing is read out twice. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Runs a change of what is in the container, and gives the focus back to the element of the same data-id. */
export function keepFocus(container, change) {
  const focused = container.contains(document.activeElement) ? document.activeElement.dataset.id : undefined;
  change();
  if (focused === undefined) return;
  for (const element of container.querySelectorAll("[data-id]")) {
    if (element.dataset.id === focused) element.focus({ preventScroll: true });
  }
}
