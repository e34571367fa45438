/** Comparison of two texts, character by character. */

/** Characters shown on both sides of the first difference. */
const AROUND = 24;

/**
 * @param {string} first
 * @param {string} second
 * @returns {number} index of the first character that differs, -1 if the texts are identical; characters are Unicode
 *     code points
 */
export function firstDifference(first, second) {
  const [a, b] = [[...first], [...second]];
  const most = Math.max(a.length, b.length);
  for (let i = 0; i < most; i++) if (a[i] !== b[i]) return i;
  return -1;
}

/**
 * @param {string} text
 * @param {number} index
 * @returns {string} the characters around an index; cut ends are marked
 */
export function excerpt(text, index) {
  const characters = [...text];
  const [from, to] = [Math.max(0, index - AROUND), index + AROUND];
  const cut = characters.slice(from, to).join("");
  return `${from > 0 ? "…" : ""}${cut}${to < characters.length ? "…" : ""}`;
}

/**
 * @param {string} plain
 * @param {string} drafted
 * @param {boolean} isComplete whether both texts were written to their ends
 * @returns {{kind: "same" | "different" | "open", title: string, index: number}}
 */
export function verdict(plain, drafted, isComplete) {
  const index = firstDifference(plain, drafted);
  const length = [...plain].length;
  if (index < 0 && isComplete) {
    return { kind: "same", title: `✓ Identical: all ${length} characters are the same`, index };
  }
  if (!isComplete) {
    return { kind: "open", title: "No verdict: a text was stopped before its end", index };
  }
  return { kind: "different", title: `✕ Different from character ${index + 1}`, index };
}
