"use strict";
(() => {
  const about = JSON.parse(document.getElementById("about").textContent);
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const finite = Number.isFinite;
  root.classList.add("js");

  // The same rules as scales.py: a filter gives the axes another domain.
  const PADDING = 0.06, REACH = 1.5, UNITS = { bytes: "B", seconds: "s", count: "" };

  function domain(axis, values, lows, highs) {
    const usable = axis.log ? (v) => finite(v) && v > 0 : finite;
    const change = axis.log ? Math.log10 : (v) => v;
    let points = values.filter(usable).map(change);
    if (!points.length) points = [0, 1];
    let low = Math.min(...points), high = Math.max(...points);
    const lengths = [lows, highs].flatMap((ends) => ends.map((end, n) => (usable(end) && usable(values[n]) ? Math.abs(change(end) - change(values[n])) : NaN))).filter(finite).sort((a, b) => a - b);
    const median = lengths.length ? lengths[Math.floor(lengths.length / 2)] : 0;
    const reach = high > low ? Math.max(REACH * (high - low), 1.05 * median) : Infinity;
    const least = Math.min(low, ...lows.filter(usable).map(change)), most = Math.max(high, ...highs.filter(usable).map(change));
    low = Math.max(least, low - reach);
    high = Math.min(most, high + reach);
    if (axis.include !== undefined) { low = Math.min(low, axis.include); high = Math.max(high, axis.include); }
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      const widen = 0.05 * Math.abs(high) || 0.5;
      low -= widen; high += widen;
    }
    const pad = PADDING * (high - low);
    low -= pad; high += pad;
    if (axis.log) { low = 10 ** low; high = 10 ** high; }
    if (axis.include !== undefined && axis.include === axis.floor) low = axis.include;
    if (axis.floor !== undefined) low = Math.max(low, axis.floor);
    if (axis.ceiling !== undefined) high = Math.min(high, axis.ceiling);
    return [axis.low ?? low, axis.high ?? high];
  }

  function scale([low, high], start, end, log) {
    const change = log ? (v) => Math.log10(Math.max(v, 1e-300)) : (v) => v;
    const a = change(low), b = change(high);
    return (value) => start + (change(value) - a) / (b - a) * (end - start);
  }

  function ticks([low, high], { log, format }) {
    const count = format in UNITS ? 4 : 6;
    if (log) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      const every = Math.max(1, Math.ceil((last - first + 1) / (count + 1)));
      const decades = [];
      for (let power = first; power <= last; power += every) decades.push(10 ** power);
      if (decades.length >= 3 || high / low > 100) return decades;
      const inside = [];
      for (let power = first - 1; power <= last; power++)
        for (const part of [1, 2, 5]) {
          const value = part * 10 ** power;
          if (low <= value * (1 + 1e-9) && value <= high * (1 + 1e-9)) inside.push(value);
        }
      if (inside.length >= 2) return inside;
    }
    const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
    const step = size * [1, 2, 2.5, 5, 10].find((part) => size * part >= raw * (1 - 1e-9));
    const values = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) values.push(n * step);
    return values;
  }

  function short(value, decimals) {
    const text = Math.abs(value).toFixed(decimals);
    const sign = value < 0 && Number(text) !== 0 ? "−" : "";
    return sign + (text.startsWith("0.") ? text.slice(1) : text);
  }
  function si(value, unit) {
    let size = value, prefix = "";
    for (const larger of ["k", "M", "G", "T"]) {
      if (Math.abs(size) < 999.5) break;
      size /= 1000; prefix = larger;
    }
    const text = String(Number(size.toPrecision(3))).replace("-", "−");
    return prefix || unit ? `${text}\u00a0${prefix}${unit}` : text;
  }
  function tickTexts(values, axis) {
    if (axis.format in UNITS) return values.map((v) => (v === 0 ? "0" : si(v, UNITS[axis.format])));
    if (axis.log) return values.map((v) => String(Number(v.toPrecision(6))).replace("-", "−"));
    let step = values.length > 1 ? Math.min(...values.slice(1).map((v, n) => Math.abs(v - values[n]))) : Math.abs(values[0] ?? 1);
    let decimals = 0;
    while (decimals < 6) {
      const scaled = step * 10 ** decimals;
      if (Math.abs(scaled - Math.round(scaled)) <= 1e-6 * Math.max(1, scaled)) break;
      decimals++;
    }
    return values.map((v) => (Math.abs(v) < 1e-12 ? "0" : short(v, decimals)));
  }
  function shown(value, format) {
    if (!finite(value)) return "–";
    if (format === "rate") return short(value, 4);
    if (format === "bytes") return si(value, "B");
    if (format === "seconds") return si(value, "s");
    if (format === "count") return value.toLocaleString("en", { maximumFractionDigits: 1 });
    return value.toPrecision(4).replace("-", "−");
  }

  // The same frame as draw.py.
  const LEFT = 60, RIGHT = 388, TOP = 30, BOTTOM = 250, WIDTH = 400;
  const ROW_LEFT = 14, ROW_LABEL = 17, ROW = 12, ROW_GAP = 7, ROW_FOOT = 46, GLYPHS = 4;
  const at = (value) => value.toFixed(1);
  const through = (points) => "M" + points.filter((p) => finite(p[0]) && finite(p[1])).map((p) => `${at(p[0])} ${at(p[1])}`).join("L");
  const move = (element, x, y) => { element.setAttribute("x", at(x)); element.setAttribute("y", at(y)); };
  const make = (name, attributes = {}, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  class Panel {
    constructor(element, kind) {
      this.element = element;
      this.kind = kind;
      this.svg = element.querySelector("svg");
      this.data = JSON.parse(element.querySelector("script").textContent);
      this.case = Number(element.dataset.case);
      this.variants = new Map([[element.dataset.variant, null], ...Object.entries(this.data.also ?? {})]);
      this.own = { x: this.data.x, xs: this.data.lines?.map((line) => line[2]) };
      this.shapes = all(".mark", this.svg);
      this.items = (this.data.lines ?? this.data.marks).map((item, number) => this.item(item, this.shapes[number]));
      this.spots = [];
      this.here = -1;
    }
    item(item, shape) {
      const number = (v) => (v === null ? NaN : v);
      if (this.data.lines) {
        const [series, name, x, y, low, high] = item;
        return { series, name, shape, x: x.map(number), y: y.map(number), low: low.map(number), high: high.map(number) };
      }
      const [series, x, y, xLow, xHigh, yLow, yHigh, tip, layer] = item;
      const values = [x, y, xLow, xHigh, yLow, yHigh].map(number);
      return { series, shape, x: values[0], y: values[1], xLow: values[2], xHigh: values[3], yLow: values[4], yHigh: values[5], tip, layer };
    }
    turn(variant) {
      if (!this.data.also) return;
      const { x, xs } = this.variants.get(variant) ?? this.own;
      this.data.x = x;
      this.items.forEach((item, number) => { item.x = xs[number]; });
      this.svg.querySelector(".label.x").textContent = x.label;
    }
    draw(wanted, layers) {
      for (const item of this.items) {
        item.seen = wanted(item.series) && (!item.layer || layers.has(item.layer));
        item.shape.classList.toggle("shown", item.seen);
        item.shape.style.display = item.seen ? "" : "none";
      }
      this.spots = [];
      const seen = this.items.filter((item) => item.seen);
      if (this.kind === "rows") this.drawRows(seen);
      else if (this.data.lines) this.drawLines(seen);
      else this.drawPlane(seen);
      return seen.length > 0;
    }
    ticks(selector, values, texts, place) {
      const group = this.svg.querySelector(selector);
      group.replaceChildren(...values.map((value, n) => make("text", place(value), texts[n])));
    }
    axisX(bounds, axis, x, bottom) {
      const values = ticks(bounds, axis);
      this.svg.querySelector(".grid.x").setAttribute("d", values.map((v) => `M${at(x(v))} ${TOP}V${bottom}`).join(""));
      this.ticks(".ticks.x", values, tickTexts(values, axis), (v) => ({ x: at(x(v)), y: bottom + 15, "text-anchor": "middle" }));
    }
    axisY(bounds, axis, y) {
      const values = ticks(bounds, axis);
      this.svg.querySelector(".grid.y").setAttribute("d", values.map((v) => `M${LEFT} ${at(y(v))}H${RIGHT}`).join(""));
      this.ticks(".ticks.y", values, tickTexts(values, axis), (v) => ({ x: LEFT - 6, y: at(y(v) + 4), "text-anchor": "end" }));
    }
    frame(xs, ys, limits) {
      const xBounds = domain(this.data.x, xs, limits.xLow, limits.xHigh), yBounds = domain(this.data.y, ys, limits.yLow, limits.yHigh);
      const x = scale(xBounds, LEFT, RIGHT, this.data.x.log), y = scale(yBounds, BOTTOM, TOP, this.data.y.log);
      this.axisX(xBounds, this.data.x, x, BOTTOM);
      this.axisY(yBounds, this.data.y, y);
      return [x, y];
    }
    drawPlane(seen) {
      const column = (name) => seen.map((item) => item[name]);
      const [x, y] = this.frame(column("x"), column("y"), { xLow: column("xLow"), xHigh: column("xHigh"), yLow: column("yLow"), yHigh: column("yHigh") });
      for (const item of seen) {
        const across = x(item.x), up = y(item.y);
        const dot = item.shape.querySelector(".seed"), whisker = item.shape.querySelector(".whisker");
        if (dot) { dot.setAttribute("cx", at(across)); dot.setAttribute("cy", at(up)); }
        else move(item.shape.querySelector(".glyph"), across, up);
        if (whisker) {
          let d = "";
          if (finite(item.xLow)) d += `M${at(x(item.xLow))} ${at(up)}H${at(x(item.xHigh))}`;
          if (finite(item.yLow)) d += `M${at(across)} ${at(y(item.yLow))}V${at(y(item.yHigh))}`;
          whisker.setAttribute("d", d);
        }
        this.spots.push({ x: across, y: up, tip: item.tip, shape: item.shape });
      }
      this.spots.sort((a, b) => a.x - b.x);
    }
    drawLines(seen) {
      const flat = (name) => seen.flatMap((item) => item[name]);
      const [x, y] = this.frame(flat("x"), flat("y"), { xLow: [], xHigh: [], yLow: flat("low"), yHigh: flat("high") });
      for (const item of seen) {
        const points = item.x.map((value, n) => [x(value), y(item.y[n])]);
        item.shape.querySelector(".line").setAttribute("d", through(points));
        const band = item.shape.querySelector(".band");
        if (band) {
          const edge = item.x.map((value, n) => [x(value), y(item.high[n])]);
          edge.push(...item.x.map((value, n) => [x(value), y(item.low[n])]).reverse());
          band.setAttribute("d", through(edge) + "Z");
        }
        const places = new Set();
        if (points.length === 1) places.add(0);
        else for (let n = 0; n < GLYPHS; n++) places.add(Math.floor((n + (item.series % 8) / 8) * (points.length - 1) / GLYPHS));
        const glyphs = all(".glyph", item.shape);
        [...places].sort((a, b) => a - b).forEach((place, n) => glyphs[n] && move(glyphs[n], ...points[place]));
        const name = about.series[item.series].name + (item.name ? `, ${item.name}` : "");
        item.x.forEach((value, n) => {
          const limits = finite(item.low[n]) ? ` [${shown(item.low[n], this.data.y.format)}, ${shown(item.high[n], this.data.y.format)}]` : "";
          const tip = `${name}: ${this.data.y.label} ${shown(item.y[n], this.data.y.format)}${limits} at ${shown(value, this.data.x.format)}${this.data.x.format === "count" ? " " + this.data.x.label : ""}`;
          this.spots.push({ x: points[n][0], y: points[n][1], tip, shape: item.shape, spot: true });
        });
      }
    }
    drawRows(seen) {
      const column = (name) => seen.map((item) => item[name]);
      const bounds = domain(this.data.x, column("x"), column("xLow"), column("xHigh"));
      const x = scale(bounds, ROW_LEFT, RIGHT, this.data.x.log);
      const start = x(this.data.base ?? bounds[0]);
      let y = TOP;
      all(".group", this.svg).forEach((group, number) => {
        const own = seen.filter((item) => item.y === number);
        group.style.display = own.length ? "" : "none";
        if (!own.length) return;
        group.setAttribute("transform", `translate(0 ${y + 12})`);
        y += ROW_LABEL;
        for (const item of own) {
          item.shape.setAttribute("transform", `translate(0 ${y + ROW / 2})`);
          const end = x(item.x), bar = item.shape.querySelector(".bar"), whisker = item.shape.querySelector(".whisker");
          if (bar) bar.setAttribute("d", `M${at(start)} -3.5H${at(end)}V3.5H${at(start)}Z`);
          if (whisker) {
            const [low, high] = [item.xLow, item.xHigh].map((v) => Math.min(Math.max(x(v), ROW_LEFT - 6), RIGHT + 6));
            whisker.setAttribute("d", `M${at(low)} 0H${at(high)}`);
          }
          move(item.shape.querySelector(".glyph"), end, 0);
          this.spots.push({ x: end, y: y + ROW / 2, tip: item.tip, shape: item.shape });
          y += ROW;
        }
        y += ROW_GAP;
      });
      this.axisX(bounds, this.data.x, x, y);
      const base = this.data.base === undefined ? "" : `M${at(x(this.data.base))} ${TOP}V${y}`;
      this.svg.querySelector(".frame").setAttribute("d", `M${ROW_LEFT} ${y}H${RIGHT}${base}`);
      this.svg.querySelector(".label.x").setAttribute("y", y + ROW_FOOT - 10);
      this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${y + ROW_FOOT}`);
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
      const variant = this.variant();
      const layers = new Set(all(".tools [data-layer]:checked", this.element).map((input) => input.dataset.layer));
      let count = 0;
      for (const panel of this.panels) {
        panel.clear();
        if (panel.variants.has(variant)) panel.turn(variant);
        const shown = panel.variants.has(variant) && filter.cases.has(panel.case)
          && panel.draw((series) => filter.series.has(series) && !this.off.has(series), layers);
        panel.element.hidden = !shown;
        count += shown;
      }
      for (const button of all("[data-legend]", this.element)) button.hidden = !filter.series.has(Number(button.dataset.legend));
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

  const filter = { cases: new Set(about.cases.keys()), series: new Set(about.series.keys()) };
  const form = document.querySelector(".filters");
  const charts = all(".chart").map((element) => new Chart(element));

  function refilter(speak) {
    const facets = new Map();
    for (const input of form ? all("[data-facet]", form) : []) {
      const place = Number(input.dataset.facet);
      if (!facets.has(place)) facets.set(place, new Set());
      if (input.checked) facets.get(place).add(input.value);
    }
    filter.cases = new Set([...about.cases.keys()].filter((number) => [...facets].every(([place, kept]) => kept.has(about.cases[number][place]))));
    const off = new Set((form ? all("[data-filter-series]", form) : []).filter((input) => !input.checked).map((input) => Number(input.dataset.filterSeries)));
    filter.series = new Set([...about.series.keys()].filter((number) => !off.has(number)));
    for (const row of all("table [data-case]"))
      row.hidden = !filter.cases.has(Number(row.dataset.case)) || (row.dataset.series !== undefined && !filter.series.has(Number(row.dataset.series)));
    for (const chart of charts) chart.apply();
    if (speak) said.textContent = `Showing ${filter.cases.size} of ${about.cases.length} cases, ${filter.series.size} of ${about.series.length} series.`;
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
      const { name, slot, marker } = about.series[number], length = 30 + 6.6 * name.length;
      if (x + length > width - gap && x > gap) { x = gap; y += 18; }
      const group = make("g", { class: `c${slot}`, transform: `translate(${x + 6} ${y})` });
      group.append(make("use", { class: "glyph", href: `#m${marker}` }), make("text", { x: 12, y: 4 }, name));
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
