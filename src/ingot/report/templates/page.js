// The contents mark the section in view; `ingot report --live` sets <body data-live>, and what changed is replaced.
"use strict";
const PARTS = "header, nav, main > section",
  SECONDS = 3;
const sources = new Map([...document.querySelectorAll(PARTS)].map((part) => [part.id, part.outerHTML]));

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const link = document.querySelector(`nav a[href="#${CSS.escape(entry.target.id)}"]`);
      if (link) link.ariaCurrent = entry.isIntersecting ? "true" : null;
    }
  },
  { rootMargin: "-20% 0px -60% 0px" },
);

function begin(part) {
  drawCharts(part);
  if (part.matches("section")) watcher.observe(part);
}

// A part whose source is unchanged keeps its zoom, its focus and its open details.
function replace(part, before) {
  const old = document.getElementById(part.id),
    source = part.outerHTML;
  if (old && sources.get(part.id) === source) return old;
  sources.set(part.id, source);
  const states = new Map(
    [...(old?.querySelectorAll("details") ?? [])].map((d) => [d.firstElementChild.textContent, d.open]),
  );
  for (const d of part.querySelectorAll("details")) d.open = states.get(d.firstElementChild.textContent) ?? d.open;
  if (old) old.replaceWith(part);
  else before.after(part);
  begin(part);
  return part;
}

async function refresh() {
  const status = document.getElementById("live");
  try {
    const response = await fetch(location.pathname, { cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    let before = null;
    for (const part of fresh.querySelectorAll(PARTS)) before = replace(part, before);
    status.textContent = "";
  } catch (error) {
    status.textContent =
      error instanceof TypeError ? "the server has ended; this page no longer updates" : error.message;
  }
}

document.querySelectorAll(PARTS).forEach(begin);
if ("live" in document.body.dataset) setInterval(refresh, 1000 * SECONDS);
