// Elements, and the layout of a tree: leaves from top to bottom, a parent at the mean of its children.

const SVG = 'http://www.w3.org/2000/svg';

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function label(text, x, y, kind = '') {
  return svg('text', { x, y, class: kind, 'text-anchor': 'middle', 'dominant-baseline': 'central' }, text);
}

// Heights by node; `children` maps a node to its children, the root is -1.
function heightsOf(children) {
  const heights = new Map();
  let free = 0;
  const place = (node) => {
    const below = children.get(node) ?? [];
    below.forEach(place);
    const mean = () => below.reduce((sum, child) => sum + heights.get(child), 0) / below.length;
    heights.set(node, below.length ? mean() : free++);
  };
  place(-1);
  return heights;
}
