// The drawing: rows of ranks, memory and messages below them, all on one axis of slots.

const AXIS = 20, CELL = 26, STRIP = 15, GAP = 6, CHART = 80, COLOURS = 8;

/** Return an SVG element with attributes, inside a parent. */
function shape(parent, name, attributes, text) {
  const element = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

/** Return the lane of a micro-batch: they take turns, unless a system says otherwise. */
function laneOf(system, microBatch) {
  return system.laneOrder.length ? system.laneOrder[microBatch % system.laneOrder.length] : microBatch % system.lanes;
}

/** Return the slots that a compute takes; a forward stands in the first of them, a backward in the last. */
function slotsOf(system, action) {
  const number = system.durations.length ? system.durations[action.microBatch % system.durations.length] : 1;
  return { first: action.op === "F" ? action.slot : action.slot - number + 1, number };
}

/** Return where rows begin: each rank has as many lines of cells as it computes at most in one slot, then a strip. */
function layoutOf(system) {
  const lines = system.byRank.map(actions => {
    const lanes = new Set(actions.filter(action => action.isCompute).map(action => laneOf(system, action.microBatch)));
    const counts = new Map();
    for (const { slot, isCompute } of actions) if (isCompute) counts.set(slot, (counts.get(slot) ?? 0) + 1);
    return Math.max(1, ...counts.values()) > 1 ? [...lanes].sort((one, other) => one - other) : [null];
  });
  const tops = [];
  let top = AXIS;
  for (const each of lines) {
    tops.push(top);
    top += each.length * CELL + STRIP + GAP;
  }
  return { lines, tops, memory: top, wire: top + CHART + GAP, height: top + 2 * CHART + 2 * GAP };
}

/** Draw a system; return the element of each action, where it stands, and the moving parts. */
function draw(svg, system, width, scales) {
  const layout = layoutOf(system);
  svg.replaceChildren();
  svg.setAttribute("width", width * system.slotCount);
  svg.setAttribute("height", layout.height);
  // on paper, where it has only the width of a sheet, all slots are narrower
  svg.setAttribute("viewBox", `0 0 ${width * system.slotCount} ${layout.height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const [begin, end] = system.period;
  shape(svg, "rect", { class: "period", x: begin * width, y: 0, width: (end - begin) * width, height: layout.height });
  const cursor = shape(svg, "rect", { class: "cursor", y: 0, width, height: layout.height });
  const every = Math.max(1, Math.ceil(22 / width));
  for (let slot = 0; slot < system.slotCount; slot += every)
    shape(svg, "text", { class: "number", x: (slot + 0.5) * width, y: AXIS / 2 }, slot);
  const elements = drawActions(svg, system, width, layout);
  const total = drawCharts(svg, system, width, layout, scales);
  const flows = shape(svg, "g", {});
  return { layout, cursor, elements, flows, total };
}

function drawActions(svg, system, width, layout) {
  const strips = new Map();
  for (const action of system.actions) {
    const place = `${action.rank} ${action.slot}`;
    if (!action.isCompute) strips.set(place, [...(strips.get(place) ?? []), action]);
  }
  return system.actions.map(action => {
    const top = layout.tops[action.rank], lines = layout.lines[action.rank];
    if (action.isCompute) {
      const line = Math.max(0, lines.indexOf(laneOf(system, action.microBatch)));
      const { first, number } = slotsOf(system, action);
      return drawCell(svg, action, first * width, top + line * CELL, number * width, system);
    }
    const others = strips.get(`${action.rank} ${action.slot}`), each = Math.min(24, width / others.length);
    const x = action.slot * width + others.indexOf(action) * each;
    return drawMark(svg, action, x, top + lines.length * CELL, each);
  });
}

function drawCell(svg, action, x, y, width, system) {
  const colour = `--c: var(--w${laneOf(system, action.microBatch) % COLOURS})`;
  const group = shape(svg, "g", { class: `cell ${action.op}`, style: colour, "data-action": action.index });
  shape(group, "rect", { x, y, width, height: CELL, rx: 2 });
  const { op, stage, microBatch, version } = action;
  const labels = [[74, `${op}${stage} m${microBatch} v${version}`], [36, `${op}${stage}v${version}`], [18, `${op}${stage}`]];
  const label = labels.find(([room]) => width >= room)?.[1];
  if (label) shape(group, "text", { x: x + width / 2, y: y + CELL / 2 }, label);
  return group;
}

function drawMark(svg, action, x, y, width) {
  const group = shape(svg, "g", { class: `mark ${action.op}`, "data-action": action.index });
  shape(group, "rect", { x: x + 0.5, y: y + 1, width: Math.max(1, width - 1), height: STRIP - 2, rx: 2 });
  if (width >= 9) shape(group, "text", { x: x + width / 2, y: y + STRIP / 2 }, action.op);
  return group;
}

/** Draw live activations stacked by rank, and bytes sent in each slot; the top line is the most of any system. */
function drawCharts(svg, system, width, layout, scales) {
  const charts = [["activations", layout.memory], ["sent", layout.wire]];
  for (const [name, top] of charts) {
    const bottom = top + CHART;
    for (const y of [top, bottom]) shape(svg, "line", { class: "rule", x1: 0, x2: width * system.slotCount, y1: y, y2: y });
    system[name].forEach((ranks, slot) => {
      let y = bottom;
      ranks.forEach((bytes, rank) => {
        const height = (bytes / scales[name]) * CHART;
        y -= height;
        const style = `fill: color-mix(in srgb, var(--w${rank % COLOURS}) 60%, var(--back))`;
        if (bytes) shape(svg, "rect", { class: "curve", style, x: slot * width, y, width, height });
      });
    });
  }
  const peak = Math.max(...system.activations.map(sum)), y = layout.memory + CHART * (1 - peak / scales.activations);
  shape(svg, "line", { class: "peak", x1: 0, x2: width * system.slotCount, y1: y, y2: y });
  return peak;
}

/** Draw lines from the actions whose values `action` reads, and to those that read what it writes. */
function drawFlows(drawing, action, sources, readers) {
  const middle = each => {
    const box = drawing.elements[each.index].firstChild;
    const part = name => +box.getAttribute(name);
    return [part("x") + part("width") / 2, part("y") + part("height") / 2];
  };
  const line = (from, to, kind) => {
    const [x1, y1] = middle(from), [x2, y2] = middle(to), bend = (x1 + x2) / 2;
    const [first, last] = y1 === y2 ? [y1 - CELL, y2 - CELL] : [y1, y2]; // an arc, where it would cross out labels
    shape(drawing.flows, "path", { class: `flow ${kind}`, d: `M${x1},${y1} C${bend},${first} ${bend},${last} ${x2},${y2}` });
  };
  for (const source of sources) line(source, action, "in");
  for (const reader of readers) line(action, reader, "out");
}
