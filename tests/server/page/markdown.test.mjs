import assert from "node:assert/strict";
import { test } from "node:test";
import { parseMarkdown, safeUrl } from "../../../src/draftree/serve/page/markdown.js";

/** The blocks as one line each, such as "<p>a <em>b</em></p>". */
function shown(source) {
  const words = (node) =>
    "tag" in node ? `<${node.tag}>${node.children.map(words).join("")}</${node.tag}>` : source.slice(node.start, node.end);
  return parseMarkdown(source).map(({ tree }) => words(tree));
}

/** All elements of a source with this tag. */
function elements(source, tag) {
  const all = (node) => ("tag" in node ? [node, ...node.children.flatMap(all)] : []);
  return parseMarkdown(source).flatMap(({ tree }) => all(tree)).filter((node) => node.tag === tag);
}

const CASES = {
  "# Title *x*\ntext": ["<h3>Title <em>x</em></h3>", "<p>text</p>"],
  "a **b** __c__ *d* _e_ ~~f~~ ***g***": [
    "<p>a <strong>b</strong> <strong>c</strong> <em>d</em> <em>e</em> <del>f</del> <strong><em>g</em></strong></p>",
  ],
  "snake_case_name, 2 * 3 * 4, **open and \\*escaped\\*": ["<p>snake_case_name, 2 * 3 * 4, **open and *escaped*</p>"],
  "`a *b*` ``c ` d`` `open": ["<p><code>a *b*</code> <code>c ` d</code> `open</p>"],
  "- a\n- b\n  - c\n\n  more\n\nend": [
    "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul><p>more</p></li></ul>",
    "<p>end</p>",
  ],
  "1. a\n   ```\n   x\n     y\n   ```\n2. b": [
    "<ol><li><p>a</p><pre><code>x\n  y</code></pre></li><li><p>b</p></li></ol>",
  ],
  "```js\n# a **b**\n": ["<pre><code># a **b**</code></pre>"],
  "~~~\n```\n~~~\nafter": ["<pre><code>```</code></pre>", "<p>after</p>"],
  "| a | b |\n|---|:-:|\n| 1 | `x` |\nend": [
    "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>x</code></td></tr></tbody></table>",
    "<p>end</p>",
  ],
  "if x:\n    return *y*": ["<p>if x:\n    return <em>y</em></p>"],
  "> a\n> *b\n> c*\n\n---": ["<blockquote><p>a\n<em>b\nc</em></p></blockquote>", "<hr></hr>"],
  "<b>html</b> &amp; <script>x</script>": ["<p><b>html</b> &amp; <script>x</script></p>"],
};

/** All cases as one text; an open fence would hold the rest. */
const TEXT = Object.keys(CASES).filter((source) => !source.startsWith("```")).join("\n\n");

for (const [source, blocks] of Object.entries(CASES)) {
  test(JSON.stringify(source), () => assert.deepEqual(shown(source), blocks));
}

test("links have an address, and only safe schemes become links", () => {
  const hrefs = (source) => elements(source, "a").map((link) => link.attributes.href);
  assert.deepEqual(hrefs("[a](https://x.example/p_(q) \"t\") ![b](http://y.example/) [c](mailto:d@e.example)"), [
    "https://x.example/p_(q)",
    "http://y.example/",
    "mailto:d@e.example",
  ]);
  assert.deepEqual(hrefs("see https://x.example/a_b, and <https://y.example>."), [
    "https://x.example/a_b",
    "https://y.example/",
  ]);
  for (const address of [
    "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "data:text/html,x", "vbscript:x", "blob:x",
    "file:///etc/passwd", "/relative", "//other.example", "x",
  ]) {
    assert.equal(safeUrl(address), null, address);
    assert.deepEqual(hrefs(`[a](${address})`), [], address);
  }
});

test("the language of a code block is the first word after the marks", () => {
  assert.equal(elements("```python title=x\n```", "pre")[0].attributes["data-language"], "python");
});

test("the texts of a source do not overlap and are in order", () => {
  let end = 0;
  const walk = (node) => {
    if ("tag" in node) return node.children.forEach(walk);
    assert.ok(node.start >= end && node.end > node.start);
    end = node.end;
  };
  for (const { tree } of parseMarkdown(TEXT)) walk(tree);
});

test("blocks before one whose first line is complete are final", () => {
  const final = [];
  for (let length = 1; length <= TEXT.length; length++) {
    const source = TEXT.slice(0, length);
    const blocks = parseMarkdown(source);
    const settled = Math.max(0, blocks.findLastIndex(({ start }) => source.includes("\n", start)));
    for (const [i, block] of blocks.slice(0, settled).entries()) {
      final[i] ??= JSON.stringify(block);
      assert.equal(JSON.stringify(block), final[i], `block ${i} at length ${length}`);
    }
  }
  assert.ok(final.length > 10);
});

test("the characters that are searched grow with the length only", () => {
  const units = ["*a _b ", "[", "[a](", "`a``b", "> ", "- ", "\n  - x", "|a", "|a|b|\n|-|-|\n", "\\", "http://", "a\n", "1. a\n\n"];
  let searched = 0;
  const { exec } = RegExp.prototype;
  RegExp.prototype.exec = function (text) {
    const from = this.global || this.sticky ? this.lastIndex : 0;
    const found = exec.call(this, text);
    if (found) searched += found.index + found[0].length - from;
    else if (!this.sticky) searched += text.length - from;
    return found;
  };
  try {
    for (const unit of units) {
      const [few, many] = [1000, 4000].map((count) => {
        searched = 0;
        parseMarkdown(unit.repeat(count));
        return searched;
      });
      assert.ok(many <= 4.5 * few, `${JSON.stringify(unit)}: ${few}, then ${many}`);
    }
  } finally {
    RegExp.prototype.exec = exec;
  }
});
