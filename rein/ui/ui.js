"use strict";
// The page asks for itself again; parts that have changed take the place of what was. Without this script
// everything still works: filters are forms, and the page reloads itself.

const seconds = Number(document.body.dataset.live);
const keyOf = element => element?.closest("[data-key]")?.dataset.key;
let mark = null;

async function refresh() {
  if (document.hidden) return;
  const lost = document.getElementById("lost");
  try {
    const headers = mark ? { "If-None-Match": mark } : {};
    const answer = await fetch(location.href, { headers, cache: "no-store" });
    lost.hidden = answer.ok || answer.status === 304;
    if (!answer.ok) return;
    mark = answer.headers.get("ETag");
    take(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch {
    lost.hidden = false;
  }
}

function take(fresh) {
  for (const part of document.querySelectorAll("[data-part]:not([data-charts])")) {
    const now = fresh.getElementById(part.id);
    if (now && now.innerHTML !== part.innerHTML) swap(part, now);
  }
  const charts = document.getElementById("charts"), now = fresh.getElementById("charts");
  if (!charts || !now || charts.textContent === now.textContent) return;
  const titles = page => [...page.querySelectorAll("[data-charts]")].map(part => part.dataset.part).join("\n");
  if (titles(document) === titles(fresh)) charts.textContent = now.textContent;
  else document.getElementById("drawings").replaceChildren(...document.adoptNode(fresh.getElementById("drawings")).childNodes);
  window.drawCurves?.();
}

// What was marked and where the focus was stays.
function swap(part, now) {
  const focus = part.contains(document.activeElement) && keyOf(document.activeElement);
  const marked = new Set([...part.querySelectorAll("input:checked")].map(keyOf));
  part.replaceChildren(...document.adoptNode(now).childNodes);
  for (const box of part.querySelectorAll("input[type=checkbox]")) box.checked = marked.has(keyOf(box));
  if (focus) [...part.querySelectorAll("[data-key]")].find(element => element.dataset.key === focus)?.focus();
}

if (seconds) setInterval(refresh, 1000 * seconds);

// Tokens: the exact numbers of the one under the mouse, or that the arrow keys are at.
const tokens = document.getElementById("tokens");
if (tokens) {
  const detail = document.getElementById("token"), table = document.getElementById("numbers");
  const heads = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
  let at = -1;

  const show = index => {
    if (index < 0 || index >= tokens.children.length) return;
    tokens.children[at]?.classList.remove("here");
    at = index;
    tokens.children[at].classList.add("here");
    const cells = [...table.tBodies[0].rows[at].cells].map(cell => cell.textContent);
    detail.textContent = heads.map((head, i) => i === 1 ? `“${cells[i]}”` : `${head} ${cells[i]}`).join("  ·  ");
    detail.hidden = false;
  };
  tokens.addEventListener("mouseover", event => {
    const index = [...tokens.children].indexOf(event.target);
    if (index >= 0) show(index);
  });
  tokens.addEventListener("focus", () => show(Math.max(at, 0)));
  tokens.addEventListener("keydown", event => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(Math.min(Math.max(at + steps[event.key], 0), tokens.children.length - 1));
  });
}
