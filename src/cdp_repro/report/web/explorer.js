// The page: what is selected, and the controls that change it.

const systems = JSON.parse(document.getElementById("systems").textContent).map(readSystem);
const largest = name => Math.max(1, ...systems.flatMap(system => system[name].map(sum)));
const scales = { activations: largest("activations"), sent: largest("sent") };
const [view, scroller, svg] = ["view", "scroll", "drawing"].map(id => document.getElementById(id));
const TICK = 700, NARROWEST = 10, WIDEST = 120;
const state = { system: systems[0], slot: 0, rank: 0, hasMoved: false, selected: null, hovered: null, width: 46, timer: null, drawing: null };

/** Draw the system anew, after it or the zoom has changed. */
function redraw() {
  state.drawing = draw(svg, state.system, state.width, scales);
  labelRows(state.drawing.layout);
  show();
}

function labelRows(layout) {
  const label = (text, y, kind = "") =>
    Object.assign(document.createElement("span"), { textContent: text, className: kind, style: `top: ${y}px` });
  const rows = layout.tops.map((top, rank) => label(`rank ${rank}`, top + (layout.lines[rank].length * CELL) / 2));
  for (const [text, name, top] of [["live activations", "activations", layout.memory], ["sent", "sent", layout.wire]])
    rows.push(label(text, top + CHART / 2), label(bytesText(scales[name]), top + 6, "scale"), label("0", top + CHART - 5, "scale"));
  document.getElementById("labels").replaceChildren(label("slot", AXIS / 2), ...rows);
}

/** Show the cursor, the selected action, and what is under the pointer. */
function show() {
  const { system, drawing, slot } = state;
  drawing.cursor.setAttribute("x", slot * state.width);
  for (const name of ["selected", "hovered"]) {
    svg.querySelector(`.${name}`)?.classList.remove(name);
    if (state[name]) drawing.elements[state[name].index].classList.add(name);
  }
  document.getElementById("totals").textContent =
    `slot ${slot} of ${system.slotCount}: live activations ${bytesText(sum(system.activations[slot]))} ` +
    `(peak ${bytesText(drawing.total)}), parameters of all versions ${bytesText(sum(system.parameters[slot]))}, ` +
    `sent ${bytesText(sum(system.sent[slot]))}, over ${system.ranks} rank${system.ranks > 1 ? "s" : ""}`;
  document.querySelector("#labels .here")?.classList.remove("here");
  if (state.hasMoved) rowLabel(state.rank).classList.add("here");
  explain(state.hovered ?? state.selected);
}

function rowLabel(rank) {
  return document.getElementById("labels").children[1 + rank]; // after that of the axis
}

function select(action) {
  Object.assign(state, { selected: action, hovered: null, slot: action.slot, rank: action.rank, hasMoved: true });
  show();
  reveal();
}

/** Scroll so that the slot of the cursor is in sight, and the rank if it is another one. */
function reveal(isOtherRank = true) {
  const left = state.slot * state.width, right = left + state.width;
  if (left < scroller.scrollLeft) scroller.scrollLeft = left - state.width;
  if (right > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = right + state.width - scroller.clientWidth;
  if (isOtherRank) rowLabel(state.rank).scrollIntoView({ block: "nearest" });
}

/** Return the actions of a rank in a slot, compute first. */
function actionsAt(rank, slot) {
  const found = state.system.byRank[rank].filter(action => action.slot === slot);
  return found.sort((one, other) => other.isCompute - one.isCompute);
}

function move(slots, ranks) {
  const within = (value, count) => Math.min(count - 1, Math.max(0, value));
  state.slot = within(state.slot + slots, state.system.slotCount);
  state.rank = within(state.rank + ranks, state.system.ranks);
  state.selected = actionsAt(state.rank, state.slot)[0] ?? null;
  state.hovered = null;
  state.hasMoved = true;
  show();
  reveal(ranks !== 0);
}

function nextInCell() {
  const here = actionsAt(state.rank, state.slot);
  if (here.length) select(here[(here.indexOf(state.selected) + 1) % here.length]);
}

function change(number) {
  const index = (number + systems.length) % systems.length;
  document.getElementById("system").selectedIndex = index;
  state.system = systems[index];
  Object.assign(state, { selected: null, hovered: null });
  state.slot = Math.min(state.slot, state.system.slotCount - 1);
  state.rank = Math.min(state.rank, state.system.ranks - 1);
  redraw();
}

/** Zoom; the slot of the cursor stays where it is on the screen. */
function zoom(factor) {
  const offset = state.slot * state.width - scroller.scrollLeft;
  state.width = Math.min(WIDEST, Math.max(NARROWEST, state.width * factor));
  redraw();
  scroller.scrollLeft = state.slot * state.width - offset;
}

function play(isPlaying = state.timer === null) {
  clearInterval(state.timer);
  state.timer = isPlaying ? setInterval(tick, TICK) : null;
  const button = document.getElementById("play");
  button.setAttribute("aria-pressed", isPlaying);
  button.textContent = isPlaying ? "stop" : "play";
}

function tick() {
  if (state.slot + 1 >= state.system.slotCount) play(false);
  else move(1, 0);
}

const KEYS = {
  ArrowLeft: () => move(-1, 0), ArrowRight: () => move(1, 0), ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1),
  Home: () => move(-Infinity, 0), End: () => move(Infinity, 0), Enter: nextInCell, " ": () => play(),
  "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3),
  "[": () => change(systems.indexOf(state.system) - 1), "]": () => change(systems.indexOf(state.system) + 1),
};

document.addEventListener("keydown", event => {
  const isControl = ["SELECT", "BUTTON"].includes(event.target.tagName);
  const own = KEYS[event.key];
  if (!own || event.ctrlKey || event.metaKey || event.altKey) return;
  if (isControl && (event.key === " " || event.key === "Enter" || event.target.tagName === "SELECT")) return;
  event.preventDefault();
  own();
});
const actionOf = event => {
  const element = event.target.closest("[data-action]");
  return element ? state.system.actions[element.dataset.action] : null;
};
svg.addEventListener("click", event => {
  const action = actionOf(event);
  if (action) select(action);
  else move(Math.floor(event.offsetX / state.width) - state.slot, 0);
});
svg.addEventListener("pointerover", event => {
  if (event.pointerType === "touch") return;
  state.hovered = actionOf(event);
  show();
});
svg.addEventListener("pointerleave", () => { state.hovered = null; show(); });
scroller.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15);
}, { passive: false });
const controls = { back: () => move(-1, 0), forward: () => move(1, 0), play: () => play(), wider: () => zoom(1.3),
  narrower: () => zoom(1 / 1.3) };
for (const [id, act] of Object.entries(controls)) document.getElementById(id).addEventListener("click", act);
const choice = document.getElementById("system");
choice.append(...systems.map(system => new Option(system.name)));
choice.addEventListener("change", () => change(choice.selectedIndex));
redraw();
