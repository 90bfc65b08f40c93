"use strict";
// Tells the values under the pointer or the arrow keys, hides series and groups. The pictures and tables work without it.
const tip = document.getElementById("tip");

function tell(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? y - box.height - 10 : y + 16}px`;
}

for (const plot of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const guide = plot.querySelector(".guide");
  const count = chart.values.length;
  let place = count - 1;
  const at = (value) => chart.left + ((chart.right - chart.left) * value) / chart.end;

  function show(x, y) {
    const middle = at((chart.bounds[place] + chart.bounds[place + 1]) / 2);
    guide.setAttribute("x1", middle);
    guide.setAttribute("x2", middle);
    guide.setAttribute("visibility", "visible");
    const round = (value) => Number(value.toPrecision(4)).toLocaleString("en");
    const when = `${round(chart.bounds[place])} to ${round(chart.bounds[place + 1])} ${chart.axis}`;
    const lines = chart.names.map((name, index) => `${name}: ${chart.values[place][index]}`);
    tell([when, ...lines].join("\n"), x, y);
  }
  function hide() {
    guide.setAttribute("visibility", "hidden");
    tip.hidden = true;
  }
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    const value = ((x - chart.left) / (chart.right - chart.left)) * chart.end;
    place = chart.bounds.findIndex((bound, index) => index > 0 && value < bound) - 1;
    if (place < 0) place = value < 0 ? 0 : count - 1;
    show(event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    if (guide.getAttribute("visibility") === "visible") place = Math.max(0, Math.min(count - 1, place + step));
    const box = plot.getBoundingClientRect();
    const middle = at((chart.bounds[place] + chart.bounds[place + 1]) / 2) / plot.viewBox.baseVal.width;
    show(box.left + middle * box.width, box.top + box.height / 2);
  });
}

for (const box of document.querySelectorAll("[data-text]")) {
  box.addEventListener("pointermove", (event) => tell(box.dataset.text, event.clientX, event.clientY));
  box.addEventListener("pointerleave", () => (tip.hidden = true));
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    const plot = document.getElementById(button.dataset.plot);
    const series = plot.querySelector(`[data-series="${button.dataset.series}"]`);
    series.toggleAttribute("hidden", !on);
  });
}

for (const box of document.querySelectorAll("input[data-section]")) {
  box.addEventListener("change", () => (document.getElementById(box.dataset.section).hidden = !box.checked));
}
