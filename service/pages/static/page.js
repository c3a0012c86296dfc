// Keeps a page fresh: fetches it again and puts the parts in place that changed. Renders nothing itself, so that
// what is seen is what the server says, with or without this script.
"use strict";

const body = document.body;
const QUIET_MS = 1000;  // at most one look a second, however much happens
const AWAY_MS = 5000;

let looking = false;
let wanted = false;
let ended = () => {};

async function refresh() {
  if (looking) {
    wanted = true;
    return;
  }
  looking = true;
  const fresh = await fetched();
  if (fresh) {
    show(fresh);
  }
  setTimeout(() => {
    looking = false;
    if (wanted) {
      wanted = false;
      refresh();
    }
  }, QUIET_MS);
}

// The page as it is now; null while the service is away, which the next look will tell.
async function fetched() {
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
    if (answer.redirected && new URL(answer.url).pathname === "/login") {
      location.assign(answer.url);
      return null;
    }
    return answer.ok ? new DOMParser().parseFromString(await answer.text(), "text/html") : null;
  } catch {
    return null;
  }
}

function show(fresh) {
  document.title = fresh.title;
  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(part.id);
    if (next && next.innerHTML !== part.innerHTML) {
      replace(part, next);
    }
  }
  for (const list of document.querySelectorAll("[data-grows]")) {
    grow(list, fresh.getElementById(list.id));
  }
  say();
  if (!isAlive()) {
    ended();
  }
}

function replace(part, next) {
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const way = focused && (focused.id ? `#${CSS.escape(focused.id)}` : focused.href && `a[href="${CSS.escape(focused.getAttribute("href"))}"]`);
  part.replaceChildren(...next.childNodes);
  if (way) {
    (part.querySelector(way) || document.getElementById("main")).focus({ preventScroll: true });
  }
}

function grow(list, next) {
  const shown = Number(list.lastElementChild?.dataset.number || 0);
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  list.append(...[...(next?.children || [])].filter((line) => Number(line.dataset.number) > shown));
  if (atEnd) {
    list.scrollTop = list.scrollHeight;
  }
}

// What a screen reader hears: states and stages, not every per cent.
function say() {
  const place = document.getElementById("said");
  const words = document.querySelector("[data-said]")?.dataset.said;
  if (place && words && place.textContent !== words) {
    place.textContent = words;
  }
}

function isAlive() {
  return document.querySelector("[data-alive]")?.dataset.alive === "yes";
}

function follow(path) {
  if (!isAlive()) {
    return;
  }
  const source = new EventSource(`${path}?after=${body.dataset.after}`);
  for (const kind of ["state", "stage", "progress", "log"]) {
    source.addEventListener(kind, refresh);
  }
  ended = () => source.close();
  source.addEventListener("error", () => {
    // The stream has ended with the job, or was refused: look at the page instead.
    if (source.readyState === EventSource.CLOSED) {
      look();
    }
  });
}

async function look() {
  await refresh();
  if (isAlive()) {
    setTimeout(look, AWAY_MS);
  }
}

if (body.dataset.events) {
  follow(body.dataset.events);
}
if (body.dataset.refreshS) {
  setInterval(() => document.visibilityState === "visible" && refresh(), 1000 * Number(body.dataset.refreshS));
}
for (const log of document.querySelectorAll(".log")) {
  log.scrollTop = log.scrollHeight;
}
for (const told of document.querySelectorAll("#errors, #preflight")) {
  told.focus();
}
