/** Construction of elements. Styles are classes, so a strict content security policy holds. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes] false, null and undefined are
 *     left out; true is an empty attribute
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

/**
 * @param {string} text
 * @param {() => void} onClick
 * @param {string} [classes]
 * @returns {HTMLButtonElement}
 */
export function button(text, onClick, classes = "") {
  const element = el("button", { type: "button", class: `quiet ${classes}`.trim() }, text);
  element.addEventListener("click", onClick);
  return element;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = /** @type {SVGElement} */ (document.createElementNS(SVG, tag));
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

/**
 * @param {Element} element
 * @param {Record<string, string | number | boolean | null | undefined>} attributes
 */
function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

/**
 * @param {string} id
 * @returns {any} the element of index.html with this id
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element with id "${id}"`);
  return element;
}

/**
 * @param {number | null | undefined} value
 * @param {number} [digits]
 * @returns {string} "–" for no number
 */
export function decimal(value, digits = 1) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

/**
 * @param {string} text
 * @returns {Promise<boolean>} whether it is in the clipboard; browsers allow that on HTTPS and on this machine only
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
