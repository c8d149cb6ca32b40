"use strict";
(() => {
  const about = JSON.parse(document.getElementById("about").textContent);
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  root.classList.add("js");
  // A phone shows what is secondary folded; printing unfolds it again.
  const folds = all("details.fold"), narrow = matchMedia("(max-width: 700px)");
  if (narrow.matches) folds.forEach((fold) => { fold.open = false; });
  addEventListener("beforeprint", () => folds.forEach((fold) => { fold.open = true; }));

  const { width: WIDTH, left: LEFT, right: RIGHT, top: TOP, bottom: BOTTOM, air, rowLeft, rowLabel, row: ROW, rowGap, rowFoot } = about.frame;
  const at = (value) => value.toFixed(1);
  const make = (name, attributes = {}, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // A picture is zoomed, not drawn again: its coordinates are read once, and moved. Scales and ticks are Python's.
  function coordinates(path) {
    let x = 0, y = 0;
    return [...path.matchAll(/([MlHVZ])([^MlHVZ]*)/g)].flatMap(([, command, text]) => {
      const numbers = (text.match(/-?[\d.]+/g) ?? []).map(Number), points = [];
      if (command === "H") points.push([x = numbers[0], y]);
      else if (command === "V") points.push([x, y = numbers[0]]);
      else for (let n = 0; n + 1 < numbers.length; n += 2) {
        [x, y] = command === "l" ? [Math.round(100 * (x + numbers[n])) / 100, Math.round(100 * (y + numbers[n + 1])) / 100] : [numbers[n], numbers[n + 1]];
        points.push([x, y]);
      }
      return points.map((point) => [command === "M" ? "M" : "L", ...point]);
    });
  }
  const PLACES = { circle: ["cx", "cy"], use: ["x", "y"], text: ["x", "y"] };
  class Part {
    constructor(element) {
      this.element = element;
      this.names = PLACES[element.tagName];
      this.drawn = (this.names ?? ["d"]).map((name) => [name, element.getAttribute(name)]);
      this.points = this.names ? [["M", ...this.names.map((name) => Number(element.getAttribute(name)))]] : coordinates(element.getAttribute("d"));
      this.closed = this.names || element.getAttribute("d").endsWith("Z") ? "Z" : "";
    }
    place(x, y) {
      const points = this.points.map(([command, a, b]) => [command, x(a), y(b)]);
      if (x === same && y === same && !this.turned) this.drawn.forEach(([name, value]) => this.element.setAttribute(name, value));
      else if (this.names) this.names.forEach((name, n) => this.element.setAttribute(name, at(points[0][n + 1])));
      else this.element.setAttribute("d", points.map(([command, a, b]) => `${command}${at(a)} ${at(b)}`).join("") + this.closed);
      return points;
    }
  }
  const same = (value) => value;
  function zoom(axis, seen, every, place, start, end) {
    // What is left to see, with some air; everything, or what has no width, keeps the whole frame.
    const inside = (item, value) => (item.layer ? value : Math.min(Math.max(value, Math.min(start, end)), Math.max(start, end)));
    const places = seen.flatMap((item) => item.parts.flatMap((part) => part.points.map((point) => inside(item, point[place]))));
    if (axis.keep !== undefined) places.push(axis.keep);
    const low = Math.min(...places), high = Math.max(...places);
    if (!axis.ladder || every || !(high - low > 0.5)) return same;
    const sign = end > start ? 1 : -1, ends = [axis.floor, axis.ceiling].map((value) => value ?? NaN);
    let [from, to] = sign > 0 ? [low, high] : [high, low];
    const wide = air * (to - from);
    from -= wide; to += wide;
    if (sign * (ends[0] - from) > 0 || axis.keep === axis.floor && axis.keep !== undefined) from = ends[0];
    if (sign * (to - ends[1]) > 0) to = ends[1];
    return (value) => start + (value - from) / (to - from) * (end - start);
  }
  function ticksIn(axis, map, start, end) {
    // Of the sets without a hole in this window, the finest that is not too fine.
    const [low, high] = [Math.min(start, end), Math.max(start, end)];
    const sets = (axis.ladder ?? []).map((ticks) => ticks.filter(([value]) => map(value) >= low - 0.1 && map(value) <= high + 0.1));
    const whole = (ticks) => {
      const places = ticks.map(([value]) => map(value)).sort((a, b) => a - b), gaps = places.slice(1).map((place, n) => place - places[n]);
      return ticks.length > 1 && Math.max(places[0] - low, high - places.at(-1), ...gaps) <= 1.4 * Math.min(...gaps);
    };
    const larger = (best, ticks) => (ticks.length > best.length ? ticks : best);
    const fit = sets.filter((ticks) => ticks.length <= axis.most);
    return (fit.some(whole) ? fit.filter(whole) : fit).reduce(larger, []);
  }

  class Panel {
    constructor(element, kind) {
      this.element = element;
      this.kind = kind;
      this.svg = element.querySelector("svg");
      this.data = JSON.parse(element.querySelector("script").textContent);
      this.case = Number(element.dataset.case);
      this.own = { label: this.svg.querySelector(".label.x").textContent, x: this.data.x, at: this.data.at };
      this.variants = new Map([[element.dataset.variant, this.own], ...Object.entries(this.data.also ?? {})]);
      this.ticks = { x: this.read(".ticks.x text", "x", 0), y: this.read(".ticks.y text", "y", -4) };
      const lines = this.data.lines ?? [];
      this.items = all(".mark", this.svg).map((shape, number) => {
        const parts = all("path, use, circle, text", shape).map((part) => new Part(part));
        const joined = all(".line", shape).length > 0, tips = this.data.tips;
        const tip = joined ? "" : tips[number - (all(".line", this.svg).length)];
        return { shape, parts, tip, line: joined ? lines[number] : null, series: Number(shape.dataset.series), layer: shape.dataset.layer };
      });
      this.variant = element.dataset.variant;
      this.spots = [];
      this.here = -1;
      const base = this.svg.querySelector(".base");
      this.base = base && new Part(base);
    }
    read(selector, name, shift) {
      return all(selector, this.svg).map((text) => [Number(text.getAttribute(name)) + shift, text.textContent]);
    }
    turn(variant) {
      // The same lines over another x: every point moves along, band and markers with it.
      const { x, xs, label } = this.variants.get(variant);
      if (this.variant === variant || !this.data.also) return;
      this.data.x = x;
      this.variant = variant;
      this.svg.querySelector(".label.x").textContent = label;
      this.items.forEach((item, number) => {
        const line = item.parts.find((part) => part.element.classList.contains("line"));
        item.first ??= line.points.map((point) => point[1]);
        const before = line.points.map((point) => [...point]), after = xs ? xs[number] : item.first;
        for (const part of item.parts) part.turned = Boolean(xs);
        for (const part of item.parts) part.points.forEach((point, n) => {
          if (part.names) point[1] = after[before.findIndex((old) => old[1] === point[1] && old[2] === point[2])] ?? point[1];
          else point[1] = after[n < after.length ? n : 2 * after.length - 1 - n];
        });
      });
    }
    draw(wanted, layers) {
      for (const item of this.items) {
        item.seen = wanted(item.series) && (!item.layer || layers.has(item.layer));
        item.shape.classList.toggle("shown", item.seen);
        item.shape.style.display = item.seen ? "" : "none";
      }
      this.spots = [];
      const seen = this.items.filter((item) => item.seen), rows = this.kind === "rows";
      const every = this.items.every((item) => item.seen === !item.layer);
      const left = rows ? rowLeft : LEFT;
      const x = zoom(this.data.x, seen, every, 1, left, RIGHT), y = rows ? same : zoom(this.data.y, seen, every, 2, BOTTOM, TOP);
      const bottom = rows ? this.stack(seen) : BOTTOM;
      for (const item of seen) this.place(item, x, y);
      if (!rows && !this.data.lines) this.spots.sort((a, b) => a.x - b.x);
      const first = this.variant === this.element.dataset.variant;
      const across = x === same && first ? this.ticks.x : ticksIn(this.data.x, x, left, RIGHT);
      this.axis("x", across, x, `${TOP}V${bottom}`, (place) => ({ x: at(place), y: bottom + 15, "text-anchor": "middle" }));
      if (!rows) this.axis("y", y === same ? this.ticks.y : ticksIn(this.data.y, y, BOTTOM, TOP), y, "", (place) => ({ x: LEFT - 6, y: at(place + 4), "text-anchor": "end" }));
      if (this.base) this.base.element.setAttribute("d", `M${at(x(this.base.points[0][1]))} ${TOP}V${bottom}`);
      if (rows) {
        this.svg.querySelector(".frame").setAttribute("d", `M${rowLeft} ${bottom}H${RIGHT}`);
        this.svg.querySelector(".label.x").setAttribute("y", bottom + rowFoot - 10);
        this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${bottom + rowFoot}`);
      }
      return seen.length > 0;
    }
    place(item, x, y) {
      let points;
      for (const part of item.parts) {
        const placed = part.place(x, y);
        if (part.element.classList.contains("line") || (part.names && !item.parts.some((other) => other.element.classList.contains("line")))) points = placed;
      }
      const { shape } = item;
      if (item.line) {
        const [head, texts] = item.line, number = this.items.indexOf(item), places = this.variants.get(this.variant).at[number];
        points.forEach(([, across, up], n) => this.spots.push({ x: across, y: up, tip: `${head}${texts[n]} at ${places[n]}`, shape, spot: true }));
      } else if (item.tip) this.spots.push({ x: points[0][1], y: points[0][2] + (item.height ?? 0), tip: item.tip, shape });
    }
    stack(seen) {
      // Rows move together: groups without any are left out.
      let y = TOP;
      const groups = all(".group", this.svg);
      const heights = groups.map((group) => Number(/ ([\d.]+)\)/.exec(group.dataset.home ??= group.getAttribute("transform"))[1]));
      groups.forEach((group, number) => {
        const within = (item) => item.home > heights[number] && !(item.home > heights[number + 1]);
        for (const item of this.items) item.home ??= Number(/ ([\d.]+)\)/.exec(item.shape.getAttribute("transform"))[1]);
        const members = seen.filter(within);
        group.style.display = members.length ? "" : "none";
        if (!members.length) return;
        group.setAttribute("transform", `translate(0 ${y + 12})`);
        y += rowLabel;
        for (const item of members) {
          item.height = y + ROW / 2;
          item.shape.setAttribute("transform", `translate(0 ${item.height})`);
          y += ROW;
        }
        y += rowGap;
      });
      return y;
    }
    axis(which, ticks, map, down, attributes) {
      const lines = ticks.map(([value]) => (which === "x" ? `M${at(map(value))} ${down}` : `M${LEFT} ${at(map(value))}H${RIGHT}`));
      this.svg.querySelector(`.grid.${which}`).setAttribute("d", lines.join(""));
      this.svg.querySelector(`.ticks.${which}`).replaceChildren(...ticks.map(([value, text]) => make("text", attributes(map(value)), text)));
    }
    nearest(event) {
      const box = this.svg.getBoundingClientRect(), factor = WIDTH / box.width;
      const x = (event.clientX - box.left) * factor, y = (event.clientY - box.top) * factor;
      const wide = this.kind === "rows";
      let best = -1, least = wide ? 9 : 26;
      this.spots.forEach((spot, number) => {
        const distance = wide ? Math.abs(spot.y - y) + 0.001 * Math.abs(spot.x - x) : Math.hypot(spot.x - x, spot.y - y);
        if (distance < least) { least = distance; best = number; }
      });
      return best;
    }
    show(number, speak) {
      this.clear();
      this.here = number;
      const spot = this.spots[number];
      if (!spot) return;
      spot.shape.classList.add("on");
      if (spot.spot) this.svg.querySelector(".marks").append(make("circle", { class: "spot", cx: at(spot.x), cy: at(spot.y), r: 7 }));
      const box = this.svg.getBoundingClientRect(), factor = box.width / WIDTH;
      tip.textContent = spot.tip;
      tip.hidden = false;
      const left = box.left + spot.x * factor, top = box.top + spot.y * factor, width = tip.offsetWidth;
      tip.style.left = `${scrollX + Math.max(8, Math.min(left - width / 2, root.clientWidth - width - 8))}px`;
      const above = top - tip.offsetHeight - 14;
      tip.style.top = `${scrollY + (above > 4 ? above : top + 16)}px`;
      if (speak) said.textContent = spot.tip;
    }
    clear() {
      all(".on", this.svg).forEach((element) => element.classList.remove("on"));
      all(".spot", this.svg).forEach((element) => element.remove());
      tip.hidden = true;
    }
  }
  const tip = document.getElementById("tip"), said = document.getElementById("said");

  class Chart {
    constructor(element) {
      this.element = element;
      this.panels = all(".panel", element).map((panel) => new Panel(panel, element.dataset.kind));
      this.off = new Set();
      this.radios = all(".choice", element);
      this.reading = [...new Set(this.panels.flatMap((panel) => [...panel.variants.keys()]))];
      for (const panel of this.panels) this.listen(panel);
      all("[data-legend]", element).forEach((button) => button.addEventListener("click", () => {
        const series = Number(button.dataset.legend), shown = this.off.has(series);
        if (shown) this.off.delete(series); else this.off.add(series);
        button.setAttribute("aria-pressed", String(shown));
        this.apply();
      }));
      all(".tools input", element).forEach((input) => input.addEventListener("change", () => this.apply()));
      all("[data-save]", element).forEach((button) => button.addEventListener("click", () => save(this, button.dataset.save)));
    }
    variant() {
      const chosen = all(".tools input[type=radio]:checked", this.element).map((input) => input.value);
      // A choice with one option has no control: the panels know its key.
      return this.reading.find((variant) => chosen.every((key) => variant.split("/").includes(key))) ?? this.reading[0];
    }
    apply() {
      const variant = this.variant(), free = this.element.dataset.free !== undefined, off = free ? new Set() : filter.off;
      const layers = new Set(all(".tools [data-layer]:checked", this.element).map((input) => input.dataset.layer));
      let count = 0;
      for (const panel of this.panels) {
        panel.clear();
        if (panel.variants.has(variant)) panel.turn(variant);
        const shown = panel.variants.has(variant) && (free || shows(panel.case))
          && panel.draw((series) => !off.has(series) && !this.off.has(series), layers);
        panel.element.hidden = !shown;
        count += shown;
      }
      for (const button of all("[data-legend]", this.element)) button.hidden = off.has(Number(button.dataset.legend));
      this.element.querySelector(".panels").classList.toggle("alone", count === 1);
      this.element.querySelector(".empty").hidden = count > 0;
    }
    listen(panel) {
      const { element } = panel;
      element.addEventListener("pointermove", (event) => {
        const number = panel.nearest(event);
        if (number < 0) panel.clear();
        else panel.show(number, false);
      });
      element.addEventListener("pointerdown", (event) => panel.show(panel.nearest(event), false));
      element.addEventListener("pointerleave", () => panel.clear());
      element.addEventListener("blur", () => panel.clear());
      element.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        const count = panel.spots.length;
        if (event.key === "Escape") panel.clear();
        if (!step && event.key !== "Home" && event.key !== "End") return;
        event.preventDefault();
        if (!count) return;
        const next = event.key === "Home" ? 0 : event.key === "End" ? count - 1 : panel.here < 0 ? (step > 0 ? 0 : count - 1) : (panel.here + step + count) % count;
        panel.show(next, true);
      });
    }
  }

  const filter = { cases: null, off: new Set() };
  const shows = (number) => !filter.cases || filter.cases.has(number);
  const form = document.querySelector(".filters");
  const charts = all(".chart").map((element) => new Chart(element));

  function refilter(speak) {
    const facets = new Map();
    for (const input of form ? all("[data-facet]", form) : []) {
      const place = Number(input.dataset.facet);
      if (!facets.has(place)) facets.set(place, new Set());
      if (input.checked) facets.get(place).add(input.value);
    }
    const kept = [...about.cases.keys()].filter((number) => [...facets].every(([place, values]) => values.has(about.cases[number][place])));
    filter.cases = form ? new Set(kept) : null;
    filter.off = new Set((form ? all("[data-filter-series]", form) : []).filter((input) => !input.checked).map((input) => Number(input.dataset.filterSeries)));
    for (const row of all("table [data-case]"))
      row.hidden = !shows(Number(row.dataset.case)) || filter.off.has(Number(row.dataset.series));
    for (const chart of charts) chart.apply();
    if (speak) said.textContent = `Showing ${kept.length} of ${about.cases.length} cases, ${about.series - filter.off.size} of ${about.series} series.`;
  }
  if (form) {
    form.addEventListener("change", () => refilter(true));
    form.addEventListener("reset", () => setTimeout(() => refilter(true)));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Saved figures are light, hold their own style, and use no custom properties: other programs do not know them.
  function picture(chart) {
    const panels = chart.panels.filter((panel) => !panel.element.hidden);
    const columns = Math.min(panels.length, chart.element.querySelector(".n3") ? 3 : 2), gap = 20;
    const width = Math.max(columns, 1) * WIDTH + (Math.max(columns, 1) + 1) * gap;
    const svg = make("svg", { xmlns: "http://www.w3.org/2000/svg", class: "plot" });
    const colour = (name) => about.light[name];
    const slots = Object.keys(about.light).filter((name) => /^s\d+$/.test(name)).map((name) => `.c${name.slice(1)}{color:${colour(name)}}`).join("");
    const css = document.getElementById("plot-style").textContent.replace(/var\(--([\w-]+)\)/g, (_, name) => colour(name));
    svg.append(make("style", {}, slots + css), document.querySelector(".shapes defs").cloneNode(true), make("rect", { width: "100%", height: "100%", fill: colour("card") }));
    let x = gap, y = gap;
    const series = [...new Set(panels.flatMap((panel) => panel.items.filter((item) => item.seen).map((item) => item.series)))].sort((a, b) => a - b);
    for (const number of series) {
      const button = chart.element.querySelector(`[data-legend="${number}"]`), name = button.textContent, length = 30 + 6.6 * name.length;
      if (x + length > width - gap && x > gap) { x = gap; y += 18; }
      const group = make("g", { class: button.querySelector("svg").classList[1], transform: `translate(${x + 6} ${y})` });
      group.append(button.querySelector("use").cloneNode(), make("text", { x: 12, y: 4 }, name));
      svg.append(group);
      x += length;
    }
    y += 18;
    let tallest = 0;
    panels.forEach((panel, number) => {
      if (number % columns === 0) { y += tallest; tallest = 0; }
      const copy = panel.svg.cloneNode(true), height = panel.svg.viewBox.baseVal.height;
      for (const [key, value] of Object.entries({ x: gap + (number % columns) * (WIDTH + gap), y, width: WIDTH, height })) copy.setAttribute(key, value);
      copy.removeAttribute("role");
      all(".spot", copy).forEach((element) => element.remove());
      all(".mark, .group", copy).forEach((element) => { if (element.style.display === "none") element.remove(); else element.removeAttribute("style"); });
      svg.append(copy);
      tallest = Math.max(tallest, height + gap);
    });
    const height = y + tallest;
    for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(key, value);
    return { text: new XMLSerializer().serializeToString(svg), width, height };
  }
  function download(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  function save(chart, kind) {
    const { text, width, height } = picture(chart), name = `${chart.element.dataset.chart}.${kind}`;
    if (kind === "svg") { download(new Blob([text], { type: "image/svg+xml" }), name); return; }
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas"), factor = 3;
      canvas.width = width * factor; canvas.height = height * factor;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => download(blob, name), "image/png");
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  }

  const theme = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  let wanted = null;
  try { wanted = localStorage.getItem("fedbilevel-theme"); } catch { /* storage may be off for files */ }
  const paint = () => {
    if (wanted === "light" || wanted === "dark") root.dataset.theme = wanted;
    theme.setAttribute("aria-checked", String(wanted ? wanted === "dark" : dark.matches));
  };
  theme.addEventListener("click", () => {
    wanted = theme.getAttribute("aria-checked") === "true" ? "light" : "dark";
    try { localStorage.setItem("fedbilevel-theme", wanted); } catch { /* then it lasts as long as the page */ }
    paint();
  });
  dark.addEventListener("change", paint);
  theme.hidden = false;
  paint();
  refilter(false);
})();
