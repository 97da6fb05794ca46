"use strict";
(() => {
  const root = document.documentElement, SVG = "http://www.w3.org/2000/svg";
  const remember = (value) => { try { if (value) localStorage.setItem("theme", value); return localStorage.getItem("theme"); } catch { return null; } };

  const button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const other = () => theme() === "dark" ? "light" : "dark";
  const named = () => { button.textContent = `Use ${other()} colours`; };
  if (["light", "dark"].includes(remember())) root.dataset.theme = remember();
  button.addEventListener("click", () => { root.dataset.theme = remember(other()) || other(); named(); });
  dark.addEventListener("change", named);
  button.hidden = false;
  named();

  for (const plot of document.querySelectorAll(".plot")) {
    const reach = plot.querySelector(".reach"), svg = reach.querySelector("svg"), tip = plot.querySelector(".tip");
    const cursor = svg.querySelector(".cursor"), { mode, stops, names } = JSON.parse(plot.querySelector("script").textContent);
    const hidden = new Set(), gone = new Set();
    const table = mode === "grid" ? document.getElementById(plot.dataset.table) : null;
    const rows = table ? table.tBodies[0].rows : [], columns = table ? rows[0].cells.length - 1 : 0;
    const count = table ? rows.length * columns : stops.length;
    let here = -1;

    const shared = plot.closest("figure").querySelectorAll(":scope > .legend button");
    for (const one of [...shared, ...plot.querySelectorAll(".legend button")]) {
      one.addEventListener("click", () => {
        const name = one.dataset.of, off = !gone.has(name);
        if (off) gone.add(name); else gone.delete(name);
        one.setAttribute("aria-pressed", String(!off));
        const i = names.indexOf(name);
        if (off) hidden.add(i); else hidden.delete(i);
        svg.querySelectorAll(`[data-series="${i}"]`).forEach((part) => part.classList.toggle("off", off));
      });
    }

    const place = (i) => {
      if (!table) return stops[i];
      const r = Math.floor(i / columns), c = i % columns, [left, top, wide, high] = stops;
      const head = `${rows[r].cells[0].textContent} / ${table.tHead.rows[0].cells[c + 1].textContent}`;
      return [left + wide * (c + .5), top + high * (r + .5), head, [[-1, rows[r].cells[c + 1].textContent || "nothing"]]];
    };
    const shape = (name, values) => {
      const part = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(values)) part.setAttribute(key, value);
      cursor.replaceChildren(part);
    };
    const show = (i) => {
      here = i;
      const [x, y, head, lines] = place(i), box = svg.viewBox.baseVal, size = svg.getBoundingClientRect();
      const scale = size.width / box.width, frame = plot.getBoundingClientRect();
      if (mode === "x") shape("path", { d: `M${x} 22V${box.height - 46}`, "stroke-dasharray": "2 3" });
      else if (table) shape("rect", { x: x - stops[2] / 2, y: y - stops[3] / 2, width: stops[2], height: stops[3], "stroke-width": 2 });
      else shape("circle", { cx: x, cy: y, r: 9 });
      cursor.removeAttribute("hidden");
      tip.replaceChildren();
      const title = tip.appendChild(document.createElement("b"));
      title.textContent = head;
      for (const [series, words] of lines) {
        if (hidden.has(series)) continue;
        tip.appendChild(document.createElement("span")).textContent = words;
      }
      const px = size.left - frame.left + x * scale, py = size.top - frame.top + y * scale;
      const left = px + 14 + tip.offsetWidth > frame.width ? Math.max(0, px - 14 - tip.offsetWidth) : px + 14;
      tip.style.left = `${left}px`;
      tip.style.top = `${Math.max(0, py - tip.offsetHeight - 8)}px`;
    };
    const hide = () => { here = -1; tip.replaceChildren(); cursor.setAttribute("hidden", "hidden"); };
    const nearest = (event) => {
      const box = svg.viewBox.baseVal, size = svg.getBoundingClientRect(), scale = box.width / size.width;
      const x = (event.clientX - size.left) * scale, y = (event.clientY - size.top) * scale;
      if (table) {
        const c = Math.floor((x - stops[0]) / stops[2]), r = Math.floor((y - stops[1]) / stops[3]);
        return c >= 0 && c < columns && r >= 0 && r < rows.length ? r * columns + c : -1;
      }
      let best = -1, least = Infinity;
      stops.forEach(([a, b], i) => {
        const away = mode === "x" ? Math.abs(a - x) : svg.dataset.kind === "points" ? Math.hypot(a - x, b - y) : Math.abs(b - y);
        if (away < least) { least = away; best = i; }
      });
      return best;
    };
    reach.addEventListener("pointermove", (event) => { const i = nearest(event); if (i < 0) hide(); else if (i !== here) show(i); });
    reach.addEventListener("pointerleave", hide);
    reach.addEventListener("focus", () => { if (here < 0 && reach.matches(":focus-visible")) show(0); });
    reach.addEventListener("blur", hide);
    reach.addEventListener("keydown", (event) => {
      const line = table ? columns : 1;
      const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: line, ArrowUp: -line, Home: -count, End: count };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      const to = here < 0 && event.key !== "End" ? 0 : here + moves[event.key];
      show(table && (to < 0 || to >= count) && event.key.startsWith("Arrow") ? here : Math.min(count - 1, Math.max(0, to)));
    });
  }
})();
