// The page of `smcserve serve`: a chat over the service's own API. All state is in this tab: the conversation and the
// token are in sessionStorage, and text of the model reaches the document as text only.

const CHAT = "/v1/chat/completions";
const MAIN = ["temperature", "max_tokens", "seed", "particles"];
const OWN_FIELDS = ["logprobs", "return_particles"];
const OPENAI = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop", "logprobs",
  "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "response_format", "tools",
]);
const EXAMPLES = [
  "Mia has 12 apples. She buys 30 more. How many now?",
  "Ivy has 35 roses. By spring she has 5 times as many. Then she doubles her roses. How many does she have now?",
  "Ruth buys 2 bags of 10 shells each. Soon she has 4 times that number. How many shells does Ruth have?",
];
const FORMATS = {
  json_schema: ["JSON of a schema", '{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'],
  json_object: ["a JSON object", null],
  regex: ["text that matches a regular expression", "[0-9]{1,3}"],
  grammar: ["text of a grammar", 'start: "yes" | "no"'],
  choice: ["one of these lines", "yes\nno"],
};
const TOOLS = [{
  type: "function",
  function: {
    name: "multiply",
    parameters: {
      type: "object",
      properties: { a: { type: "number" }, b: { type: "number" } },
      required: ["a", "b"],
    },
  },
}];
const FRESH = {
  system: "", values: {}, negative: "", format: "", formatText: "", tools: "", methods: ["", ""], compare: false,
  inTurn: true, logprobs: true, return_particles: true, turns: [],
};

const $ = (id) => document.getElementById(id);

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

// --- State -----------------------------------------------------------------------------------------------------------

function stored(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}

const state = { ...structuredClone(FRESH), ...stored("smcserve.chat") };
let server = null; // What /page/settings says.
let running = null; // The AbortController of the answers that are on their way.
let leaving = false; // The page is being left or loaded again, which ends its requests.
let saving = 0;

function save() {
  clearTimeout(saving);
  saving = 0;
  try {
    sessionStorage.setItem("smcserve.chat", JSON.stringify(state));
  } catch {
    // A conversation beyond the browser's quota is lost with a reload, and goes on until then.
  }
}

function saveSoon() {
  saving ||= setTimeout(save, 300);
}

const token = () => $("token").value.trim();
const headers = () => (token() ? { authorization: `Bearer ${token()}` } : {});

class Refused extends Error {
  // An error as the server words it.
  constructor(error, status) {
    super(error.message);
    Object.assign(this, { param: error.param ?? null, code: error.code ?? "", status });
  }

  static async of(response) {
    try {
      return new Refused((await response.json()).error, response.status);
    } catch {
      return new Refused({ message: response.statusText || "the server gave no reason" }, response.status);
    }
  }
}

// --- Settings --------------------------------------------------------------------------------------------------------

async function loadSettings() {
  $("banner").hidden = true;
  try {
    const response = await fetch("/page/settings", { headers: headers() });
    if (!response.ok) throw await Refused.of(response);
    server = await response.json();
  } catch (error) {
    $("banner").textContent = error instanceof Refused ? error.message : `The server does not answer: ${error.message}`;
    $("banner").hidden = false;
    if (error.status === 401) askForToken();
    return;
  }
  showSettings();
}

function askForToken() {
  openSettings(true);
  $("token").focus();
}

function showSettings() {
  const groups = server.worker_groups;
  const ready = groups.filter((group) => group.serving).length;
  $("model").textContent = groups.length > 1 ? `${server.model}, ${ready} of ${groups.length} worker groups` : server.model;
  const states = groups.map((group, number) => `worker group ${number}: ${groupState(group)}`);
  const about = `${server.model}, ${server.context} tokens of context`;
  $("model").title = groups.length > 1 ? [about, ...states].join("\n") : about;
  const others = server.methods.filter((method) => method !== server.method);
  for (const index of [0, 1]) {
    const select = $(`method-${index}`);
    select.replaceChildren(...server.methods.map((method) => new Option(method, method)));
    if (!server.methods.includes(state.methods[index])) {
      const wanted = index === 0 ? server.method : "target";
      state.methods[index] = index && wanted === state.methods[0] ? others[0] : wanted;
    }
    select.value = state.methods[index];
  }
  const parts = { "main-settings": [], "sampling-settings": [], "method-settings": [] };
  for (const name of MAIN) parts["main-settings"].push(...server.settings.filter((one) => one.name === name));
  for (const one of server.settings) {
    if (MAIN.includes(one.name) || OWN_FIELDS.includes(one.name)) continue;
    parts[one.methods.length === server.methods.length ? "sampling-settings" : "method-settings"].push(one);
  }
  for (const [id, settings] of Object.entries(parts)) $(id).replaceChildren(...settings.map(settingField));
  $("sampling-settings").append(negativePrompt());
  const formats = server.constraints.filter((kind) => kind in FORMATS);
  $("format").replaceChildren(new Option("any text", ""), ...formats.map((kind) => new Option(FORMATS[kind][0], kind)));
  $("format").value = state.format;
  $("tools-section").hidden = !server.tools;
  showFormat();
  showMethods();
}

function groupState(group) {
  if (!group.serving) return "not ready";
  return `${group.running} running, ${group.waiting} waiting${group.has_draft ? "" : ", no draft"}`;
}

function settingField(setting) {
  const box = make("div", "setting");
  box.dataset.setting = setting.name;
  const id = `setting-${setting.name}`;
  const label = make("label", "field");
  label.htmlFor = id;
  label.append(make("span", "", setting.name), make("span", "allowed", fieldAllowed(setting)));
  box.append(label, settingInput(setting, id));
  if (setting.help) {
    const help = make("p", "help", setting.help);
    help.id = `${id}-help`;
    box.lastElementChild.setAttribute("aria-describedby", help.id);
    box.append(help);
  }
  return box;
}

function fieldAllowed(setting) {
  const each = { texts: "one a line: ", integers: "with commas: ", biases: "JSON: " }[setting.kind] ?? "";
  return ["choice", "flag"].includes(setting.kind) ? "" : each + setting.allowed;
}

function settingInput(setting, id) {
  const { name, kind } = setting;
  let input;
  if (kind === "choice" || kind === "flag") {
    input = make("select");
    const names = kind === "flag" ? ["true", "false"] : setting.choices;
    input.append(new Option(setting.default === null ? "default" : `default (${setting.default})`, ""));
    input.append(...names.map((one) => new Option(one, one)));
  } else if (kind === "texts") {
    input = make("textarea");
    input.rows = 2;
  } else {
    input = make("input");
    input.inputMode = { integer: "numeric", number: "decimal" }[kind] ?? "text";
  }
  input.id = id;
  if (kind !== "choice" && kind !== "flag") {
    const some = setting.default === null || (Array.isArray(setting.default) && !setting.default.length);
    input.placeholder = some ? "default" : JSON.stringify(setting.default);
  }
  input.value = state.values[name] ?? "";
  input.addEventListener("input", () => {
    if (input.value === "") delete state.values[name];
    else state.values[name] = input.value;
    input.classList.remove("wrong");
    input.removeAttribute("aria-invalid");
    saveSoon();
  });
  return input;
}

function negativePrompt() {
  const box = make("div", "setting");
  box.dataset.setting = "negative_prompt";
  const label = make("label", "field");
  label.htmlFor = "setting-negative_prompt";
  label.append(make("span", "", "negative_prompt"), make("span", "allowed", "with guidance_scale"));
  const input = make("textarea");
  Object.assign(input, { id: "setting-negative_prompt", rows: 2, placeholder: "none", value: state.negative });
  input.addEventListener("input", () => {
    state.negative = input.value;
    saveSoon();
  });
  box.append(label, input);
  return box;
}

function showFormat() {
  const example = FORMATS[state.format]?.[1];
  $("format-text").hidden = example == null;
  $("format-text").placeholder = example ?? "";
  $("format-text").value = state.formatText;
  $("tools").placeholder = JSON.stringify(TOOLS, null, 1);
}

function showMethods() {
  $("compare").checked = state.compare;
  $("in-turn").checked = state.inTurn;
  $("method-1").disabled = !state.compare;
  $("turns-label").hidden = !state.compare;
  for (const name of OWN_FIELDS) $(name).checked = state[name];
  for (const box of document.querySelectorAll("[data-setting]")) {
    const setting = server?.settings.find((one) => one.name === box.dataset.setting);
    box.classList.toggle("idle", !!setting && !columns().some((index) => setting.methods.includes(state.methods[index])));
  }
}

const columns = () => (state.compare ? [0, 1] : [0]);

// --- A request -------------------------------------------------------------------------------------------------------

// Integers of up to 64 bits keep their digits. What is no number goes as it is: the server says what is wrong.
function integer(text) {
  const value = text.trim();
  if (!/^-?(0|[1-9][0-9]*)$/.test(value)) return Number.isFinite(Number(value)) ? Number(value) : value;
  return value.length < 16 || !JSON.rawJSON ? Number(value) : JSON.rawJSON(value);
}

function settingValue(kind, text) {
  const parsers = {
    integer,
    number: (value) => (Number.isFinite(Number(value)) ? Number(value) : value),
    flag: (value) => value === "true",
    texts: (value) => value.split("\n").filter((line) => line !== ""),
    integers: (value) => value.split(/[\s,]+/).filter(Boolean).map(integer),
    biases: (value) => parsedOr(value, value),
  };
  return parsers[kind] ? parsers[kind](text) : text;
}

function parsedOr(text, otherwise) {
  try {
    return JSON.parse(text);
  } catch {
    return otherwise;
  }
}

function formatFields() {
  const { format, formatText } = state;
  if (!format) return {};
  const text = formatText || FORMATS[format][1];
  if (format === "json_object") return { response_format: { type: "json_object" } };
  if (format === "choice") return { structured_outputs: { choice: text.split("\n").filter((line) => line !== "") } };
  if (format !== "json_schema") return { structured_outputs: { [format]: text } };
  const schema = parsedOr(text, null);
  // The server says what is wrong with a schema that is no JSON.
  if (schema === null) return { constraint: { json_schema: text } };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

function toolFields() {
  const text = server?.tools ? state.tools.trim() : "";
  return text ? { tools: parsedOr(text, text) } : {};
}

// What a column has seen of the conversation before a turn: its own answers, or the first column's where it was not there.
function history(index, end) {
  const messages = state.system ? [{ role: "system", content: state.system }] : [];
  for (const turn of state.turns.slice(0, end)) {
    const answer = turn.answers[index] ?? turn.answers[0];
    if (!answer || (!answer.pieces.length && !answer.calls.length)) continue;
    messages.push({ role: "user", content: turn.question }, assistantMessage(answer));
  }
  return messages;
}

function assistantMessage(answer) {
  const message = { role: "assistant", content: answer.pieces.join("") };
  if (answer.calls.length) message.tool_calls = answer.calls;
  return message;
}

function requestBody(index, question, end) {
  const method = state.methods[index];
  const body = {
    model: server?.model,
    messages: [...history(index, end), { role: "user", content: question }],
    stream: true,
    stream_options: { include_usage: true },
  };
  if (method) body.method = method;
  for (const setting of server?.settings ?? []) {
    const text = state.values[setting.name];
    if (text !== undefined && setting.methods.includes(method)) body[setting.name] = settingValue(setting.kind, text);
  }
  if (state.negative) body.negative_prompt = state.negative;
  if (state.logprobs && method !== "draft") body.logprobs = true;
  if (state.return_particles && method === "smc") body.return_particles = true;
  return { ...body, ...formatFields(), ...toolFields() };
}

// Data of server-sent events.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function send(question) {
  const turn = { question, answers: columns().map((index) => newAnswer(state.methods[index])) };
  const bodies = columns().map((index) => requestBody(index, question, state.turns.length));
  // Of one seed the exact method and the target write the same answer, but for near ties (`whatHolds`).
  if (state.compare && bodies.every((body) => body.seed === undefined)) {
    const seed = Math.floor(Math.random() * 2 ** 31);
    for (const body of bodies) body.seed = seed;
  }
  state.turns.push(turn);
  const cards = showTurn(turn);
  scrollDown(true);
  save();
  const controller = (running = new AbortController());
  showRunning();
  try {
    const runs = bodies.map((body, index) => () => receive(body, turn.answers[index], cards[index], controller.signal));
    if (state.inTurn) for (const run of runs) await run();
    else await Promise.all(runs.map((run) => run()));
  } finally {
    running = null;
    showTurns(turn, cards);
    showRunning();
    save();
  }
}

function newAnswer(method) {
  return {
    method, pieces: [], reasoning: "", calls: [], tokens: null, particles: null, facts: null, numbers: null, error: null,
    state: "waiting",
  };
}

async function receive(body, answer, card, signal) {
  if (signal.aborted) return finish(answer, card, "stopped");
  const begin = performance.now();
  let first = null;
  answer.state = "writing";
  answer.verification = body.verification;
  showAnswer(card, answer);
  try {
    const response = await fetch(CHAT, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await Refused.of(response);
    let isDone = false;
    for await (const data of events(response.body)) {
      isDone = data === "[DONE]";
      if (isDone) break;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error, null);
      if (takeEvent(event, data, answer, card)) first ??= performance.now();
    }
    if (!isDone) throw new Error("the connection ended before the answer was complete");
    measure(answer, begin, first ?? performance.now(), performance.now());
    finish(answer, card, answer.facts?.finish_reason ?? "done");
  } catch (error) {
    if (signal.aborted) return finish(answer, card, "stopped");
    if (leaving) return;
    answer.error = { message: error.message, code: error.code ?? "", status: error.status ?? null };
    finish(answer, card, "failed");
    if (error instanceof Refused) pointTo(error);
  }
}

function finish(answer, card, how) {
  answer.state = how;
  showAnswer(card, answer);
  scrollDown();
  saveSoon();
}

// Whether the event holds something of the answer.
function takeEvent(event, data, answer, card) {
  if (event.usage) answer.count = event.usage.completion_tokens;
  const [choice] = event.choices;
  if (!choice) return false;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content) {
    answer.pieces.push(content);
    card.querySelector(".text").append(make("span", "piece", content));
  }
  if (reasoning) answer.reasoning += reasoning;
  for (const call of calls ?? []) takeCall(answer, call);
  takeTokens(answer, choice.logprobs?.content ?? []);
  if (reasoning || calls) showAnswer(card, answer);
  if (choice.smc) takeEnding(choice, data, answer);
  if (content || reasoning || calls) {
    scrollDown();
    saveSoon();
  }
  return Boolean(content || reasoning || calls);
}

function takeCall(answer, part) {
  if (part.id) answer.calls[part.index] = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
  answer.calls[part.index].function.arguments += part.function.arguments ?? "";
}

function takeTokens(answer, entries) {
  if (!entries.length) return;
  answer.tokens ??= [];
  for (const { bytes, logprob, top_logprobs: top } of entries) {
    answer.tokens.push({ bytes, logprob, top: top.map((other) => [other.token, other.logprob]) });
  }
}

function takeEnding(choice, data, answer) {
  const { token_ids: ids, particles, statistics, times, ...facts } = choice.smc;
  facts.seed = /"seed": ?(-?\d+)/.exec(data)?.[1] ?? String(facts.seed); // All of its 64 bits.
  answer.facts = { ...facts, ...prefixed("times", times), ...statistics };
  answer.statistics = statistics;
  answer.particles = particles;
  answer.tokens?.forEach((token, index) => { token.id = ids?.[index]; });
}

function prefixed(name, values) {
  return Object.fromEntries(Object.entries(values).map(([key, value]) => [`${name}.${key}`, value]));
}

function measure(answer, begin, first, end) {
  const rounds = answer.statistics?.rounds ?? 0;
  const confirmed = answer.statistics?.accepted_per_round || (rounds ? (answer.count - 1) / rounds : null);
  answer.numbers = {
    first: first - begin,
    rate: answer.count / ((end - begin) / 1000),
    perRound: answer.statistics ? confirmed : 1,
    tokens: answer.count,
  };
}

// Show which field an error is about.
function pointTo(error) {
  if (error.status === 401) return askForToken();
  // A field within another one is named by its path, such as `constraint.json_schema`.
  const field = (error.param ?? "").split(/[.[]/)[0];
  const id = { response_format: "format-text", structured_outputs: "format-text", constraint: "format-text" }[field];
  const input = $(id ?? `setting-${error.param}`) ?? $(error.param);
  if (!input || !$("fields").contains(input)) return;
  openSettings(true);
  for (let part = input; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  input.classList.add("wrong");
  input.setAttribute("aria-invalid", "true");
  input.scrollIntoView({ block: "nearest" });
}

// --- The conversation ------------------------------------------------------------------------------------------------

function showAll() {
  $("turns").replaceChildren();
  for (const turn of state.turns) showTurns(turn, showTurn(turn));
  scrollDown(true);
}

function showTurn(turn) {
  const box = make("article", "turn");
  const answers = make("div", turn.answers.length > 1 ? "answers two" : "answers");
  const cards = turn.answers.map((answer) => {
    const card = make("section", `answer ${answer.method}`);
    card.setAttribute("aria-label", `Answer of ${answer.method}`);
    showAnswer(card, answer);
    return card;
  });
  answers.append(...cards);
  box.append(make("p", "question", turn.question), answers);
  $("turns").append(box);
  showEmpty();
  return cards;
}

// Once both are complete: whether they are the same.
function showTurns(turn, cards) {
  if (turn.answers.length < 2 || turn.answers.some((answer) => !answer.numbers)) return;
  const [one, other] = turn.answers.map((answer) => answer.pieces.join(""));
  const [slower, faster] = turn.answers.map((answer) => answer.numbers.rate).sort((a, b) => a - b);
  const same = one === other ? "the same text" : "a different text";
  cards.forEach((card, index) => {
    const isFaster = turn.answers[index].numbers.rate === faster && faster > slower;
    const more = isFaster ? `, ${(faster / slower).toFixed(1)}x as fast` : "";
    card.querySelector("header span").textContent = `${turn.answers[index].state}, ${same}${more}`;
  });
}

function showEmpty() {
  $("empty").hidden = state.turns.length > 0;
  $("turns").classList.toggle("two", state.turns.some((turn) => turn.answers.length > 1));
}

function showAnswer(card, answer) {
  card.setAttribute("aria-busy", String(answer.state === "writing"));
  const open = new Set([...card.querySelectorAll("details[open]")].map((one) => one.className));
  const head = make("header");
  head.append(make("strong", "", answer.method || "answer"), make("span", "", answer.state));
  const parts = [head];
  if (answer.reasoning) parts.push(unfolding("reasoning", "Reasoning", [make("p", "", answer.reasoning)]));
  if (!answer.error || answer.pieces.length) parts.push(textOf(answer));
  for (const { function: called } of answer.calls) parts.push(make("pre", "call", `${called.name}(${called.arguments})`));
  if (answer.error) parts.push(errorBox(answer.error));
  if (answer.numbers) parts.push(numbers(answer.numbers));
  if (answer.facts?.method === "exact") parts.push(make("p", "note", whatHolds(answer)));
  if (answer.particles?.length) parts.push(particles(answer.particles));
  if (answer.facts) parts.push(unfolding("statistics", "Statistics", [facts(answer.facts)]));
  for (const part of parts) if (open.has(part.className)) part.open = true;
  card.replaceChildren(...parts);
}

function errorBox(error) {
  const box = make("p", "failed", error.message);
  box.setAttribute("role", "alert");
  const code = [error.status, error.code].filter(Boolean).join(" ");
  if (code) box.append(make("small", "", code));
  return box;
}

// The pieces as they came, each with its tokens where the answer's end has told them.
function textOf(answer) {
  const box = make("p", "text");
  const split = answer.tokens?.length ? tokensByPiece(answer) : null;
  answer.pieces.forEach((text, index) => {
    const piece = make("span", "piece");
    const tokens = split?.[index];
    if (!tokens) piece.textContent = text;
    else {
      const count = tokens.reduce((sum, token) => sum + token.count, 0);
      piece.classList.add(`d${Math.min(Math.max(count, 1), 8)}`);
      piece.append(...tokens.map((token) => tokenSpan(token, index, count)));
    }
    box.append(piece);
  });
  return box;
}

function tokenSpan(token, index, count) {
  const span = make("span", "token", token.text);
  const percent = token.logprob === null ? "" : `, probability ${(100 * Math.exp(token.logprob)).toPrecision(3)}%`;
  const others = token.top.map(([text, logprob]) => `\n${JSON.stringify(text)} ${(100 * Math.exp(logprob)).toPrecision(3)}%`);
  const ids = token.ids.filter((id) => id !== undefined).join(", ");
  span.title = `token ${ids}${percent}\npiece ${index + 1}, of ${count} token${count === 1 ? "" : "s"}${others.join("")}`;
  return span;
}

// Tokens of each piece, with their texts; null where the text is not the tokens' own, as with tool calls.
function tokensByPiece(answer) {
  const encoder = new TextEncoder();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const found = [];
  let next = 0;
  for (const piece of answer.pieces) {
    const tokens = [];
    let left = encoder.encode(piece).length;
    let bytes = [];
    let group = [];
    while (left > 0) {
      const token = answer.tokens[next++];
      if (!token) return null;
      bytes.push(...token.bytes);
      group.push(token);
      let text;
      try {
        text = decoder.decode(new Uint8Array(bytes));
      } catch {
        continue; // The character goes on in the next token.
      }
      left -= bytes.length;
      const { logprob, top } = group[group.length - 1];
      tokens.push({ text, logprob, top, ids: group.map((one) => one.id), count: group.length });
      [bytes, group] = [[], []];
    }
    if (left < 0 || tokens.map((token) => token.text).join("") !== piece) return null;
    found.push(tokens);
  }
  return found;
}

function numbers({ first, rate, perRound, tokens }) {
  const list = make("dl", "numbers");
  const rows = [
    ["First token", first < 1000 ? first.toFixed(0) : (first / 1000).toFixed(2), first < 1000 ? "ms" : "s"],
    ["Tokens / second", rate < 100 ? rate.toFixed(1) : rate.toFixed(0), ""],
    ["Tokens / round", perRound === null ? "-" : perRound.toFixed(1), ""],
    ["Tokens", String(tokens), ""],
  ];
  for (const [name, value, unit] of rows) {
    const row = make("div");
    const shown = make("dd", "", value);
    if (unit) shown.append(make("small", "", ` ${unit}`));
    row.append(make("dt", "", name), shown);
    list.append(row);
  }
  return list;
}

// What an exact answer and the target's of the same seed have in common.
function whatHolds({ facts, verification }) {
  if (verification === "rejection") return "Follows the target's distribution.";
  return `The target's answer${facts.numerics === "invariant" ? ", bit for bit." : ", but for near ties between tokens."}`;
}

function unfolding(className, title, children) {
  const box = make("details", className);
  box.append(make("summary", "", title), ...children);
  return box;
}

function particles(all) {
  const rows = [...all].sort((one, other) => other.weight - one.weight).map((particle) => {
    const row = make("div", "particle");
    const meter = make("meter");
    Object.assign(meter, { min: 0, max: 1, value: particle.weight });
    meter.setAttribute("aria-hidden", "true");
    const text = make("p", "", particle.text.replace(/\n+/g, " \u21b5 "));
    text.append(make("small", "", ` ${particle.finish_reason}, ${particle.token_ids.length} tokens`));
    row.append(make("span", "weight", `${(100 * particle.weight).toFixed(1)}%`), text, meter);
    return row;
  });
  return unfolding("particles", all.length === 1 ? "1 particle" : `${all.length} particles`, rows);
}

function facts(values) {
  const list = make("dl", "facts");
  for (const [name, value] of Object.entries(values)) {
    const shown = make("dd", "", value === null ? "-" : String(Number.isInteger(value) || typeof value !== "number" ? value : +value.toPrecision(5)));
    if (name === "seed") shown.append(useSeed(value));
    list.append(make("dt", "", name), shown);
  }
  return list;
}

function useSeed(seed) {
  const button = make("button", "", "use again");
  button.type = "button";
  button.addEventListener("click", () => {
    state.values.seed = seed;
    if ($("setting-seed")) $("setting-seed").value = seed;
    save();
  });
  return button;
}

function scrollDown(always = false) {
  const box = $("scroll");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

function showRunning() {
  const isFocused = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  if (isFocused) $("question").focus();
}

// --- The same request as code ----------------------------------------------------------------------------------------

const SHELL_TOKEN = "SMCSERVE_TOKEN";

function code() {
  const index = Number($("code-column").value) || 0;
  const typed = $("question").value.trim();
  const last = state.turns.at(-1);
  const isLast = !typed && last !== undefined;
  const question = isLast ? last.question : typed || EXAMPLES[0];
  const body = requestBody(index, question, isLast ? state.turns.length - 1 : state.turns.length);
  return $("language").value === "curl" ? curl(body) : python(body);
}

function curl(body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl -N ${quoted(location.origin + CHAT)}`, `-H 'content-type: application/json'`];
  if (token()) lines.push(`-H "authorization: Bearer $${SHELL_TOKEN}"`);
  lines.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

function python(body) {
  const known = Object.entries(body).filter(([name, value]) => OPENAI.has(name) && value !== undefined);
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const fields = known.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(extra).length) fields.push(`    extra_body=${literal(extra, 1)},`);
  const key = token() ? `os.environ["${SHELL_TOKEN}"]` : '"none"';
  return [
    ...(token() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(location.origin + "/v1")}, api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...fields,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "print()",
  ].join("\n");
}

// A JSON value as Python writes it.
function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object" || JSON.isRawJSON?.(value)) return JSON.stringify(value);
  const inner = Array.isArray(value)
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = open + inner.join(", ") + close;
  if (short.length < 80 && !short.includes("\n")) return short;
  const indent = "    ".repeat(depth);
  return `${open}\n${inner.map((item) => `${indent}    ${item},\n`).join("")}${indent}${close}`;
}

async function copyCode() {
  const text = $("code-text").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS browsers have no clipboard, except on the same machine.
    getSelection().selectAllChildren($("code-text"));
    document.execCommand("copy");
  }
  $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
}

function showCode() {
  $("code-text").textContent = code();
}

function openCode() {
  $("code-column").replaceChildren(...columns().map((index) => new Option(state.methods[index], String(index))));
  $("code-column").parentElement.hidden = !state.compare;
  showCode();
  $("code").showModal();
}

// --- What people do --------------------------------------------------------------------------------------------------

const isWide = () => matchMedia("(min-width: 861px)").matches;

function openSettings(open) {
  $("settings").classList.toggle("open", open);
  $("show-settings").setAttribute("aria-expanded", String(open));
}

function fitQuestion() {
  const input = $("question");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function submit() {
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  fitQuestion();
  send(question);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function bind(id, name, after = () => {}) {
  const input = $(id);
  const property = input.type === "checkbox" ? "checked" : "value";
  input[property] = state[name];
  input.addEventListener("input", () => {
    state[name] = input[property];
    input.classList.remove("wrong");
    after();
    saveSoon();
  });
}

function begin() {
  // What was on its way when the page was left has ended there.
  for (const turn of state.turns) {
    for (const answer of turn.answers) if (["waiting", "writing"].includes(answer.state)) answer.state = "stopped by a reload";
  }
  $("token").value = stored("smcserve.token") ?? "";
  $("token").addEventListener("change", () => {
    sessionStorage.setItem("smcserve.token", JSON.stringify(token()));
    loadSettings();
  });
  bind("system", "system");
  bind("tools", "tools");
  bind("format-text", "formatText");
  bind("format", "format", () => {
    state.formatText = "";
    showFormat();
  });
  bind("compare", "compare", showMethods);
  bind("in-turn", "inTurn");
  for (const name of OWN_FIELDS) bind(name, name);
  for (const index of [0, 1]) {
    $(`method-${index}`).addEventListener("input", (event) => {
      state.methods[index] = event.target.value;
      showMethods();
      saveSoon();
    });
  }
  $("examples").append(...EXAMPLES.map((text) => {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => running || send(text));
    return button;
  }));
  $("fields").addEventListener("submit", (event) => event.preventDefault());
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("question").addEventListener("input", fitQuestion);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || $("code").open) return;
    if (running) running.abort();
    else if (!isWide()) openSettings(false);
  });
  $("new-chat").addEventListener("click", () => {
    running?.abort();
    state.turns = [];
    save();
    showAll();
    showEmpty();
    $("question").focus();
  });
  $("reset").addEventListener("click", () => {
    Object.assign(state, structuredClone(FRESH), { turns: state.turns, methods: state.methods, compare: state.compare });
    for (const name of ["system", "tools"]) $(name).value = "";
    save();
    if (server) showSettings();
  });
  $("show-settings").addEventListener("click", () => openSettings(!$("settings").classList.contains("open")));
  $("show-code").addEventListener("click", openCode);
  $("close-code").addEventListener("click", () => $("code").close());
  $("copy").addEventListener("click", copyCode);
  for (const id of ["language", "code-column"]) $(id).addEventListener("input", showCode);
  $("theme").value = stored("smcserve.theme") ?? "";
  setTheme($("theme").value);
  $("theme").addEventListener("input", () => {
    sessionStorage.setItem("smcserve.theme", JSON.stringify($("theme").value));
    setTheme($("theme").value);
  });
  addEventListener("beforeunload", () => {
    leaving = true;
    setTimeout(() => (leaving = false), 2000); // What began there may be a download.
    save();
  });
  addEventListener("pagehide", save);
  openSettings(isWide());
  showMethods();
  showAll();
  showEmpty();
  loadSettings();
  if (!matchMedia("(pointer: coarse)").matches) $("question").focus();
}

begin();
