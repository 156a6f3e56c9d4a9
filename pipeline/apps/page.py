"""The page of `drivetrain serve`: drop a picture, see what the model predicts. It loads nothing from elsewhere."""

_ALLOWED = {
    "default-src": "'none'", "style-src": "'unsafe-inline'", "script-src": "'unsafe-inline'", "img-src": "data: blob:",
    "connect-src": "'self'",
}  # fmt: skip
POLICY = "; ".join(f"{kind} {what}" for kind, what in _ALLOWED.items())
"""Its content security policy. `frame-ancestors` is left open: the page may be part of another one."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --ink: #222; --soft: #667078; --paper: #fff; --line: #d5dadd; --mark: #2b6cb0;
  --tint: #eaf1f8; --wrong: #b5452c }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --soft: #9aa5ad; --paper: #16191b; --line: #3a4145;
  --mark: #6ea8e0; --tint: #1d2a37; --wrong: #e8886f } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0 0 .8rem; overflow-wrap: anywhere }
main { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
label { display: grid; place-items: center; min-height: 15rem; padding: .8rem; text-align: center; cursor: pointer;
  border: 2px dashed var(--line); border-radius: 10px; color: var(--soft) }
label:hover, label.over, label:focus-within { border-color: var(--mark); background: var(--tint) }
input { position: absolute; opacity: 0; width: 1px; height: 1px }
img { max-width: 100%; max-height: 24rem; border-radius: 6px; display: block }
img.mask { image-rendering: pixelated; margin-bottom: .8rem }
ol { list-style: none; margin: 0; padding: 0 }
li { display: grid; grid-template-columns: 1fr auto; gap: 0 .8rem; margin-bottom: .55rem; overflow-wrap: anywhere }
li.first { font-weight: 600 }
li span + span { font-variant-numeric: tabular-nums }
meter { grid-column: 1 / 3; width: 100%; height: 9px; appearance: none; background: var(--line); border: 0;
  border-radius: 5px; overflow: hidden }
meter::-webkit-meter-bar { background: var(--line); border: 0; border-radius: 5px; height: 9px }
meter::-webkit-meter-optimum-value { background: var(--mark); border-radius: 5px }
meter::-moz-meter-bar { background: var(--mark) }
p { margin: 0; color: var(--soft) } p.wrong { color: var(--wrong) }
pre { overflow-x: auto; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
</style></head>
<body><h1>{name}</h1>
<main>
<label id="drop"><input type="file" id="file" accept="image/jpeg,image/png,image/webp,image/bmp,image/gif,image/tiff">
<span id="hint">Drop a picture here, paste it, or tap to choose one.</span></label>
<section id="answer" aria-live="polite"><p>The prediction appears here. The picture is not kept.</p></section>
</main>
<script>
"use strict";
const drop = document.getElementById("drop"), file = document.getElementById("file");
const answer = document.getElementById("answer"), MOST = 10;
let turn = 0;

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}
function say(text, kind) { answer.replaceChildren(element("p", text, kind)); }
function shares(rows, marked) {
  const list = element("ol");
  for (const [name, share] of rows.slice(0, MOST)) {
    const row = element("li", undefined, marked.includes(name) ? "first" : "");
    const bar = element("meter");
    bar.value = share;
    bar.setAttribute("aria-label", name);
    row.append(element("span", name), element("span", (100 * share).toFixed(1) + " %"), bar);
    list.append(row);
  }
  const found = [list];
  if (rows.length > MOST) found.push(element("p", "and " + (rows.length - MOST) + " more"));
  return found;
}
function numbers(rows) {
  const list = element("ol");
  for (const [name, value] of rows) {
    const row = element("li");
    row.append(element("span", name), element("span", value === null ? "not finite" : Number(value.toPrecision(5))));
    list.append(row);
  }
  return [list];
}
function shown(row) {
  if (row.probabilities) {
    const rows = Object.entries(row.probabilities).sort((a, b) => b[1] - a[1]);
    return shares(rows, row.labels || [row.class]);
  }
  if (row.pixels) {
    const mask = element("img", undefined, "mask");
    mask.src = row.mask;
    mask.alt = "class of each pixel, by color";
    const all = Object.values(row.pixels).reduce((a, b) => a + b, 0) || 1;
    const rows = Object.entries(row.pixels).filter(each => each[1]).map(([name, count]) => [name, count / all]);
    rows.sort((a, b) => b[1] - a[1]);  // names that are numbers come first, and in their own order
    return [mask, ...shares(rows, [])];
  }
  if (row.values) return numbers(Object.entries(row.values));
  if (typeof row.value === "number") return numbers([["value", row.value]]);
  return [element("pre", JSON.stringify(row, null, 1))];
}
async function predict(picture) {
  if (!picture) return;
  const now = ++turn, preview = element("img");
  preview.alt = "the picture: " + (picture.name || "pasted");
  preview.onload = preview.onerror = () => URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(picture);
  drop.querySelectorAll("img, #hint").forEach(old => old.remove());
  drop.append(preview);
  say("…");
  try {
    const got = await fetch("predict", { method: "POST", body: picture, headers: { Accept: "application/json" } });
    const row = await got.json();
    if (now !== turn) return;  // another picture was chosen meanwhile
    if (got.ok) answer.replaceChildren(...shown(row)); else say(row.error, "wrong");
  } catch (error) {
    if (now === turn) say("The server does not answer: " + error.message, "wrong");
  }
}
file.onchange = () => { predict(file.files[0]); file.value = ""; };
addEventListener("dragover", event => { event.preventDefault(); drop.classList.add("over"); });
addEventListener("dragleave", event => { if (!event.relatedTarget) drop.classList.remove("over"); });
addEventListener("drop", event => {
  event.preventDefault();
  drop.classList.remove("over");
  predict(event.dataTransfer.files[0]);
});
addEventListener("paste", event => predict(event.clipboardData.files[0]));
</script></body></html>
"""
