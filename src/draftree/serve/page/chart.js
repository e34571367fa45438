/** Small charts: bars with their numbers as text, and a sparkline. */

import { decimal, el, svg } from "./dom.js";

/**
 * Share of rounds in which the token at a depth was accepted.
 *
 * @param {{depth: number, drafted: number, accepted: number}[]} rows
 * @returns {HTMLElement} a list; every bar has its numbers beside it
 */
export function depthBars(rows) {
  const items = rows.map(({ depth, drafted, accepted }) => {
    const share = drafted ? accepted / drafted : 0;
    return barRow(`${depth}`, share, `${Math.round(share * 100)} %`, `${accepted} of ${drafted} rounds`, "drafted");
  });
  return el("ol", { class: "bars" }, ...items);
}

/**
 * Speeds side by side, each relative to the fastest.
 *
 * @param {{name: string, speed: number | null, origin: string}[]} runs speeds in tokens/s
 * @returns {HTMLElement}
 */
export function speedBars(runs) {
  const most = Math.max(1e-9, ...runs.map((run) => run.speed ?? 0));
  const items = runs.map((run) =>
    barRow(run.name, (run.speed ?? 0) / most, decimal(run.speed), "tokens/s", run.origin),
  );
  return el("ul", { class: "bars wide" }, ...items);
}

/**
 * @param {string} name
 * @param {number} share of the full width, 0 to 1
 * @param {string} value
 * @param {string} detail
 * @param {string} origin class of the bar
 */
function barRow(name, share, value, detail, origin) {
  const fill = el("span", { class: `fill ${origin}` });
  fill.style.width = `${Math.max(share * 100, 0.5)}%`;
  return el(
    "li",
    {},
    el("span", { class: "name" }, name),
    el("span", { class: "track", "aria-hidden": "true" }, fill),
    el("span", { class: "value" }, value),
    el("span", { class: "detail" }, detail),
  );
}

/**
 * Points of a line that fills a box; the largest value touches the top.
 *
 * @param {number[]} values not negative
 * @param {number} width
 * @param {number} height
 * @returns {string} of an SVG polyline; empty for fewer than two values
 */
export function linePoints(values, width, height) {
  if (values.length < 2) return "";
  const most = Math.max(...values) || 1;
  const step = width / (values.length - 1);
  return values.map((value, i) => `${round(i * step)},${round(height - 1 - (value / most) * (height - 2))}`).join(" ");
}

function round(value) {
  return Math.round(value * 10) / 10;
}

/**
 * A line of the last values with its scale: 0 and the largest value at the side, the time below.
 *
 * @param {number[]} values not negative
 * @param {{label: string, unit: string, seconds: number}} options seconds between the first value and now
 * @returns {HTMLElement} a figure; its image has the last and the largest value in its name
 */
export function sparkline(values, { label, unit, seconds }) {
  const [width, height] = [240, 48];
  const digits = values.every(Number.isInteger) ? 0 : 1;
  const last = decimal(values.at(-1), digits);
  const most = decimal(Math.max(0, ...values), digits);
  const picture = svg("svg", { class: "sparkline", role: "img", viewBox: `0 0 ${width} ${height}` });
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("aria-label", `${label}: now ${last} ${unit}, highest ${most}, ${values.length} samples`);
  const points = linePoints(values, width, height);
  if (points) {
    picture.append(svg("polygon", { points: `0,${height} ${points} ${width},${height}` }), svg("polyline", { points }));
  }
  const scale = (name, ...words) => el("div", { class: name }, ...words.map((word) => el("span", {}, word)));
  return el(
    "figure",
    {},
    el("figcaption", {}, `${label}: `, el("strong", {}, last), ` ${unit}`),
    el("div", { class: "plot" }, scale("values", points ? most : "", points ? "0" : ""), picture),
    scale("times", points ? `${Math.round(seconds)} s ago` : "", "now"),
  );
}
