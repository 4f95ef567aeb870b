"use strict";
const { page, above, below } = JSON.parse(document.getElementById("data").textContent);
const traces = new Map(), turnOf = new Map(), paragraphs = new Map(page.paragraphs.map((p) => [p.id, p]));
page.turns.forEach((turn, t) => turn.traces.forEach((trace) => { traces.set(trace.id, trace); turnOf.set(trace.id, t); }));
const cards = new Map([...traces.keys()].map((id) => [id, document.getElementById("trace-" + id)]));
const edges = [...document.querySelectorAll(".edge")];
const questions = [...document.querySelectorAll(".question")];
const answers = [...document.querySelectorAll(".answer")];
const detail = document.getElementById("detail"), legend = [...detail.childNodes];

function el(name, options, ...children) {
  const node = Object.assign(document.createElement(name), options);
  node.append(...children);
  return node;
}
const link = (id) => el("a", { href: "#A" + id }, "[A" + id + "]");
const chips = (words) => words.map((word) => el("span", { className: "chip", dir: "auto" }, word));
const line = (id, text) => el("li", { dir: "auto" }, link(id), " ", text || "no answer");
function part(title, ...children) { return [el("h3", {}, title), ...children]; }
function list(ids, text) {
  return ids.length ? el("ul", {}, ...ids.map((id) => line(id, text(id)))) : el("p", { className: "muted" }, "nothing");
}
const answerOf = (id) => traces.get(id).answer;

// The sub-question with the answers of the traces it refers to; an answer is never searched for references itself.
function resolved(text) {
  return text.split(/(\[A\d+\])/).map((piece) => {
    const id = /^\[A\d+\]$/.test(piece) ? Number(piece.slice(2, -1)) : NaN;
    return traces.has(id) && answerOf(id) ? el("mark", { title: piece, dir: "auto" }, answerOf(id)) : piece;
  });
}

function highlighted(text, answer) {
  const words = answer.trim();
  if (!words) return [text];
  const plain = words.replace(/[\\^$.*+?()[\]{}|\/]/g, "\\$&").replace(/\s+/g, "\\s+");
  const start = /^\w/.test(words) ? "(?<![\\p{L}\\p{N}])" : "", end = /\w$/.test(words) ? "(?![\\p{L}\\p{N}])" : "";
  return text.split(new RegExp(start + "(" + plain + ")" + end, "iu")).map((s, i) => (i % 2 ? el("mark", {}, s) : s));
}

function evidence(id, answer) {
  const found = paragraphs.get(id);
  if (!found) return el("article", {}, el("p", { className: "muted" }, id + " is not among the paragraphs of this page"));
  return el("article", {}, el("b", { dir: "auto" }, ...highlighted(found.title, answer)),
    el("p", { dir: "auto" }, ...highlighted(found.text, answer)));
}

function showTrace(trace) {
  const users = below[trace.id].filter((id) => traces.get(id).deps.includes(trace.id));
  const rest = (all, direct) => all.filter((id) => !direct.includes(id));
  const more = (ids) => (ids.length ? [el("p", { className: "muted" }, "and through these ", ...ids.flatMap((id) => [link(id), " "]))] : []);
  detail.replaceChildren(
    el("h2", { dir: "auto" }, "[A" + trace.id + "] ", ...resolved(trace.sub_question)),
    el("p", {}, ...chips(trace.flags), el("a", { href: "#T" + (turnOf.get(trace.id) + 1) }, "turn " + (turnOf.get(trace.id) + 1))),
    ...(trace.deps.length ? part("As planned", el("p", { dir: "auto" }, trace.sub_question)) : []),
    ...part("Keywords", el("p", { dir: "auto" }, trace.keywords || "none")),
    ...part("Answer", el("p", { dir: "auto" }, el("b", {}, trace.answer || "no answer"))),
    ...part("Evidence", ...(trace.paragraph_ids.length ? trace.paragraph_ids.map((id) => evidence(id, trace.answer))
      : [el("p", { className: "muted" }, "no paragraph")])),
    ...part("Needs", list(trace.deps, answerOf), ...more(rest(above[trace.id], trace.deps))),
    ...part("Needed by", list(users, (id) => traces.get(id).sub_question), ...more(rest(below[trace.id], users))));
}

function showTurn(turn, t) {
  detail.replaceChildren(
    el("h2", { dir: "auto" }, "Turn " + (t + 1)), el("p", { dir: "auto" }, turn.question), el("p", {}, ...chips(turn.labels)),
    ...part("Answer", el("p", { dir: "auto" }, el("b", {}, turn.answer || "no answer"))),
    ...part("Traces", list(turn.traces.map((trace) => trace.id), (id) => traces.get(id).sub_question)));
}

function mark(self, up, down) {
  const sets = [["self", new Set(self)], ["above", new Set(up)], ["below", new Set(down)]];
  const on = new Set([...self, ...up, ...down]), back = new Set([...self, ...up]), front = new Set([...self, ...down]);
  document.body.classList.toggle("picked", on.size > 0);
  for (const [id, card] of cards) {
    for (const [name, set] of sets) card.classList.toggle(name, set.has(id));
    card.classList.toggle("on", on.has(id));
    card.ariaCurrent = sets[0][1].has(id) ? "true" : null;
  }
  for (const edge of edges) {
    const from = Number(edge.dataset.from), to = Number(edge.dataset.to);
    edge.classList.toggle("on", (back.has(from) && back.has(to)) || (front.has(from) && front.has(to)));
  }
}

function select() {
  const [, kind, number] = /^#([AT])(\d+)$/.exec(location.hash) || [];
  const trace = kind === "A" && traces.get(Number(number)), t = kind === "T" ? Number(number) - 1 : -1, turn = page.turns[t];
  questions.forEach((question, n) => question.classList.toggle("self", n === t));
  answers.forEach((answer, n) => answer.classList.toggle("on", n === t || (trace && n === turnOf.get(trace.id))));
  detail.scrollTop = 0;
  if (trace) {
    mark([trace.id], above[trace.id], below[trace.id]);
    showTrace(trace);
    cards.get(trace.id).scrollIntoView({ block: "nearest", inline: "nearest" });
  } else if (turn) {
    mark(turn.traces.map((item) => item.id), [], []);
    showTurn(turn, t);
    questions[t].scrollIntoView({ block: "nearest", inline: "nearest" });
  } else {
    mark([], [], []);
    detail.replaceChildren(...legend);
  }
}

// Up and down: the traces of a turn and the question above them; left and right: the same row of the next turn.
function move(event) {
  if (event.key === "Escape") { location.hash = ""; return; }
  const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
  const here = document.activeElement.closest("section");
  if (!step || !here || event.altKey || event.ctrlKey || event.metaKey) return;
  const sections = [...document.querySelectorAll("section")], stops = (section) => [...section.querySelectorAll("a")];
  const next = sections[sections.indexOf(here) + step[0]];
  const row = stops(here).indexOf(document.activeElement) + step[1];
  const goal = next && stops(next)[Math.max(0, Math.min(row, stops(next).length - 1))];
  if (goal) { goal.focus(); event.preventDefault(); }
}

addEventListener("hashchange", select);
addEventListener("keydown", move);
select();
