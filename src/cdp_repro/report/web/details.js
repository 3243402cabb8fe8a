// The details: what an action does, what it reads and from whom, what it writes and for whom.

const details = document.getElementById("details");

/** Add an element with a text. */
function add(name, text, parent = details) {
  return parent.appendChild(Object.assign(document.createElement(name), { textContent: text }));
}

/** Fill the details of an action, and draw where its values come from and go to. */
function explain(action) {
  details.replaceChildren();
  state.drawing.flows.replaceChildren();
  if (!action) {
    const asks = "Hover, tap or use the arrow keys to see what an action reads and writes.";
    add("p", state.hasMoved ? `rank ${state.rank}, slot ${state.slot}: idle` : asks);
    return;
  }
  add("h2", `${KINDS[action.op]}: ${action.label}`);
  add("p", `rank ${action.rank}, slot ${action.slot}${delayText(action)}`);
  const sources = [...listReads(action), ...listOtherEnd(action)];
  const readers = listWrites(action);
  listBeside(action);
  drawFlows(state.drawing, action, sources, readers);
}

/** List what an action reads; return the actions that have made it. */
function listReads(action) {
  if (!action.reads.length) return [];
  add("p", "reads");
  const list = add("ul", "");
  return action.reads.flatMap(value => {
    const item = add("li", `${value}: ${describe(value)}, `, list), source = sourceOf(action, value);
    const isOwn = source?.rank === action.rank;
    if (!source) item.append("there from the start");
    else item.append(isOwn ? "made by " : `from rank ${source.rank}: `, linkTo(source, `${source.label} in slot ${source.slot}`));
    if (action.frees.includes(value)) item.append("; last read here");
    return source ? [source] : [];
  });
}

/** List what an action writes; return the actions that read it on its rank. */
function listWrites(action) {
  if (!action.writes.length) return [];
  add("p", "writes");
  const list = add("ul", "");
  return action.writes.flatMap(value => {
    const item = add("li", `${value}: ${describe(value)}`, list), readers = readersOf(state.system, action, value);
    if (readers.length) item.append(", read by ", linkTo(readers[0], placeText(readers[0])));
    if (readers.length > 1) item.append(` and ${readers.length - 1} more`);
    return readers;
  });
}

/** Name the other end of a message; return the SEND of one that is received. */
function listOtherEnd(action) {
  if (action.op === "S") add("p", `goes to rank ${action.peer}`);
  if (action.op !== "R") return [];
  const send = senderOf(state.system, action);
  add("p", "comes from ").append(linkTo(send, placeText(send)));
  return [send];
}

/** List what else the rank does in the slot. */
function listBeside(action) {
  const others = actionsAt(action.rank, action.slot).filter(other => other !== action);
  if (!others.length) return;
  const line = add("p", "in the same slot: ");
  others.forEach((other, number) => line.append(number ? ", " : "", linkTo(other, other.label)));
}

/** Return the action that made a value: on another rank, if it was received. */
function sourceOf(action, value) {
  const writer = writerOf(state.system, action, value);
  if (!writer || writer.op !== "R") return writer;
  const send = senderOf(state.system, writer);
  return (send && writerOf(state.system, send, value)) ?? send ?? writer;
}

function delayText({ isCompute, microBatch, version }) {
  if (!isCompute) return "";
  const { microBatches, summed } = state.system, step = Math.floor(microBatch / microBatches);
  const late = Math.floor(microBatch / summed) - version, unit = summed === microBatches ? "training step" : "update";
  const said = late === 0 ? "fresh" : `${late} ${unit}${late > 1 ? "s" : ""} late`;
  return `, training step ${step}; parameters at version ${version}, ${said}`;
}

const placeText = action => `${action.label} on rank ${action.rank}, slot ${action.slot}`;

/** Return a button that selects an action. */
function linkTo(action, text) {
  const button = Object.assign(document.createElement("button"), { className: "link", textContent: text });
  button.addEventListener("click", () => {
    select(action);
    view.focus({ preventScroll: true }); // the button is gone
  });
  return button;
}
