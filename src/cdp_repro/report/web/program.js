// A program as the page holds it: actions as text, read back, and who made what each of them reads.

const KINDS = {
  F: "forward", B: "backward", I: "backward of the input", W: "backward of the weights", U: "update", S: "send",
  R: "receive", A: "add", C: "collective",
};

/** Return an action from its text, such as "F2.m5@v1: x2.m5! p2@v1 -> s2.m5 x3.m5". */
function parseAction(text, rank, slot, index) {
  const colon = text.indexOf(": "), arrow = text.indexOf("->", colon);
  const words = part => part.split(" ").filter(Boolean);
  const label = text.slice(0, colon), reads = words(text.slice(colon + 1, arrow));
  const compute = label.match(/^[FBIW](\d+)\.m(\d+)@v(\d+)$/), update = label.match(/^U(\d+)@v(\d+)$/);
  const peer = label.match(/[<>](\d+)$/);
  return {
    text, label, rank, slot, index, op: label[0], isCompute: Boolean(compute),
    stage: compute ? +compute[1] : update ? +update[1] : null,
    microBatch: compute ? +compute[2] : null,
    version: compute ? +compute[3] : update ? +update[2] : null,
    peer: peer ? +peer[1] : null,
    reads: reads.map(word => word.replace("!", "")),
    frees: reads.filter(word => word.endsWith("!")).map(word => word.slice(0, -1)),
    writes: words(text.slice(arrow + 2)),
  };
}

/** Return a system with its actions in the order in which they run, in all and by rank. */
function readSystem(data) {
  const actions = [];
  data.slots.forEach((lines, slot) => {
    for (const line of lines.split("\n").filter(Boolean)) {
      const space = line.indexOf(" ");
      actions.push(parseAction(line.slice(space + 1), +line.slice(0, space), slot, actions.length));
    }
  });
  const byRank = Array.from({ length: data.ranks }, (_, rank) => actions.filter(action => action.rank === rank));
  return { ...data, actions, byRank, slotCount: data.slots.length };
}

/** Return the action of the same rank that has made the value that `action` reads; undefined if it was there. */
function writerOf(system, action, value) {
  const isIt = other => other.index < action.index && other.writes.includes(value);
  return system.byRank[action.rank].findLast(isIt);
}

/** Return the SEND that a RECEIVE gets its value from. */
function senderOf(system, receive) {
  const value = receive.writes[0];
  const isIt = other => other.op === "S" && other.peer === receive.rank && other.label.startsWith(`S ${value}>`);
  const sends = system.byRank[receive.peer].filter(isIt);
  return sends.find(send => send.slot >= receive.slot) ?? sends.at(-1);
}

/** Return the actions of the same rank that read what `action` writes, up to the one that writes it again. */
function readersOf(system, action, value) {
  const later = system.byRank[action.rank].filter(other => other.index > action.index);
  const end = later.findIndex(other => other.writes.includes(value));
  return (end < 0 ? later : later.slice(0, end + 1)).filter(other => other.reads.includes(value));
}

/** Say what a value is. */
function describe(value) {
  const [, kind, stage, rest] = value.match(/^(pf|pb|[xsdwkhgpb])(\d+)(.*)$/);
  const number = (rest.match(/[.@[][mwv]?(\d+)/) ?? [])[1], version = (rest.match(/@v(\d+)/) ?? [])[1];
  const part = rest.includes("#") ? `, part ${rest.split("#")[1].replace("/", " of ")}` : "";
  const words = {
    x: `output of stage ${stage - 1}, micro-batch ${number}`,
    s: `activations that stage ${stage} keeps for the backward of micro-batch ${number}`,
    d: `gradient of the output of stage ${stage}, micro-batch ${number}`,
    w: `what the weights' gradients of stage ${stage} still need, micro-batch ${number}`,
    k: `what stage ${stage} keeps of the tokens up to those of micro-batch ${number}`,
    h: `gradient of what stage ${stage} keeps of the tokens up to those of micro-batch ${number}`,
    g: `gradients of stage ${stage}, ${membersText(rest)}`,
    p: `parameters of stage ${stage}, version ${version}`,
    pf: `parameters of stage ${stage}, version ${version}, lent for a forward`,
    pb: `parameters of stage ${stage}, version ${version}, lent for a backward`,
    b: `buffers of stage ${stage}, set ${number}`,
  };
  return words[kind] + part;
}

/** Name the micro-batches of a sum, such as those of "[4:6]" or "[1:6:4]". */
function membersText(text) {
  const [start, stop, stride = 1] = (text.match(/\[(.*?)\]/) ?? ["", "0:1"])[1].split(":").map(Number);
  const members = [];
  for (let each = start; each < stop; each += stride) members.push(each);
  return members.length > 1 ? `sum over micro-batches ${members.join(", ")}` : `micro-batch ${members[0]}`;
}

/** Return bytes with a unit that suits them. */
function bytesText(number) {
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const [size, unit] = units.find(([size]) => number >= size) ?? [1, "bytes"];
  return `${+(number / size).toPrecision(4)} ${unit}`;
}

const sum = numbers => numbers.reduce((total, each) => total + each, 0);
