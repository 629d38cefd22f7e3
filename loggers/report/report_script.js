// Episodes by task, text, reward and outcome.
const filter = document.getElementById("filter");
if (filter) {
  const list = document.getElementById("episode-list"), all = [...list.children];
  const texts = new Map(all.map(one => [one, one.textContent.toLowerCase()]));
  const show = () => {
    const want = Object.fromEntries(new FormData(filter)), key = want.order.replace("-", "");
    const sign = want.order.startsWith("-") ? -1 : 1;
    let count = 0;
    for (const one of all.sort((a, b) => sign * (a.dataset[key] - b.dataset[key]))) {
      const d = one.dataset, shown = d.task.includes(want.task.trim().toLowerCase())
        && texts.get(one).includes(want.text.toLowerCase())
        && (want.low === "" || +d.reward >= +want.low) && (want.high === "" || +d.reward <= +want.high)
        && (!want.passed || d.passed === want.passed);
      one.hidden = !shown; count += shown;
    }
    list.append(...all);
    filter.querySelector("output").textContent = `${count} of ${all.length}`;
  };
  filter.addEventListener("input", show);
  filter.addEventListener("submit", event => event.preventDefault());
  filter.hidden = false; show();
}

// A comparison: settings to be hidden, or told from the others while the pointer is on their name.
const off = new Set(), marks = s => document.querySelectorAll(`svg [data-s="${s}"]`);
for (const row of document.querySelectorAll(".key [data-s]")) {
  const s = +row.dataset.s, box = row.querySelector("input");
  const follow = () => {
    off[box.checked ? "delete" : "add"](s);
    for (const mark of marks(s)) mark.style.display = box.checked ? "" : "none";
  };
  const dim = on => {
    for (const mark of document.querySelectorAll("svg [data-s]")) mark.classList.toggle("dim", on && +mark.dataset.s !== s);
  };
  box.addEventListener("change", follow);
  row.addEventListener("pointerenter", () => dim(true));
  row.addEventListener("pointerleave", () => dim(false));
  box.hidden = false; follow();
}

// Tables by the column whose head is chosen: numbers by their size, largest first.
for (const head of document.querySelectorAll("table.sorted th")) {
  head.addEventListener("click", () => {
    const table = head.closest("table"), [first, ...rows] = table.rows, column = head.cellIndex;
    const value = row => row.cells[column].textContent.replaceAll(",", "");
    const way = head.dataset.way = head.dataset.way === "down" ? "up" : "down";
    rows.sort((a, b) => {
      const [u, v] = [parseFloat(value(a)), parseFloat(value(b))];
      const least = isNaN(u) || isNaN(v) ? isNaN(u) - isNaN(v) || value(a).localeCompare(value(b)) : v - u;
      return way === "down" ? least : -least;
    });
    first.parentNode.append(...rows);
  });
}

// Charts: values under the pointer; a drag zooms all of them to its steps, a double click ends that.
const EDGE = 4;  // as in svg.py
const ticks = (low, high, count) => {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(i * step);
  return found;
};
const label = (v, percent) => {
  const short = (n, digits) => String(+n.toPrecision(digits));
  if (percent) return short(100 * v, 4) + "%";
  for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= unit) return short(v / unit, 4) + suffix;
  return short(v, 0 < Math.abs(v) && Math.abs(v) < 1e-3 ? 2 : 4);
};
const part = (parent, name, attributes, text = "") => {
  const one = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  one.textContent = text; parent.append(one);
  return one;
};

function chart(svg) {
  const data = JSON.parse(svg.dataset.hover), figure = svg.closest("figure");
  const plot = svg.querySelector(".plot"), axes = svg.querySelector(".ticks"), whole = axes.innerHTML;
  const [left, right] = data.px, [top, floor] = data.py;
  let xs = data.x, ys = data.y, line = null, tip = null, from = null, box = null;
  const span = pair => pair[1] - pair[0] || 1;
  const px = (x, range) => left + (x - range[0]) / span(range) * (right - left);
  const py = (y, range) => floor - (y - range[0]) / span(range) * (floor - top);

  const fitted = () => {  // the y that the shown part of the lines has
    const found = [];
    for (const s of data.series) {
      if (off.has(s.s)) continue;
      s.y.forEach((y, i) => { if ((s.x[i + 1] ?? s.x[i]) >= xs[0] && (s.x[i - 1] ?? s.x[i]) <= xs[1]) found.push(y); });
    }
    if (data.stacked || !found.length) return data.y;
    const low = Math.min(...found), high = Math.max(...found), margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low - margin, high + margin];
  };
  const zoom = range => {
    const zoomed = range && range[1] > data.x[0] && range[0] < data.x[1];
    xs = zoomed ? [Math.max(range[0], data.x[0]), Math.min(range[1], data.x[1])] : data.x;
    ys = zoomed ? fitted() : data.y;
    const sx = span(data.x) / span(xs), sy = span(data.y) / span(ys);
    plot.setAttribute("viewBox", [px(xs[0], data.x) - EDGE / sx, py(ys[1], data.y) - EDGE / sy,
      (right - left + 2 * EDGE) / sx, (floor - top + 2 * EDGE) / sy].join(" "));
    axes.innerHTML = zoomed ? "" : whole;
    if (!zoomed) return;
    for (const v of ticks(...ys, 5)) {
      const y = py(v, ys);
      part(axes, "line", {class: "grid", x1: left, x2: right, y1: y, y2: y});
      part(axes, "text", {class: "ytick", x: left - 6, y: y + 3.5}, label(v, data.percent));
    }
    for (const v of ticks(...xs, right > 500 ? 8 : 4))
      part(axes, "text", {class: "xtick", x: Math.min(Math.max(px(v, xs), left + 4), right - 10), y: floor + 13}, label(v));
  };

  const leave = () => { line?.remove(); tip?.remove(); line = tip = null; };
  const at = event => {  // pixels of the drawing
    const outer = svg.getBoundingClientRect();
    return (event.clientX - outer.left) * svg.viewBox.baseVal.width / outer.width;
  };
  const step = p => xs[0] + (Math.min(Math.max(p, left), right) - left) / (right - left) * span(xs);
  const move = event => {
    leave();
    const p = at(event);
    if (from !== null) {
      box ??= part(svg, "rect", {class: "chosen", y: top, height: floor - top});
      box.setAttribute("x", Math.max(left, Math.min(p, from)));
      box.setAttribute("width", Math.abs(Math.min(Math.max(p, left), right) - from));
    }
    if (p < left - 8 || p > right + 8) return;
    const x = step(p), rows = []; let nearest = x;
    for (const s of data.series) {
      if (!s.x.length || off.has(s.s)) continue;
      let best = 0;
      for (let i = 1; i < s.x.length; i++) if (Math.abs(s.x[i] - x) < Math.abs(s.x[best] - x)) best = i;
      if (!rows.length) nearest = s.x[best];
      rows.push([s, s.y[best]]);
    }
    const cx = Math.min(Math.max(px(nearest, xs), left), right);
    line = part(svg, "line", {class: "cursor", x1: cx, x2: cx, y1: top, y2: floor});
    tip = document.createElement("div"); tip.className = "tip";
    const head = document.createElement("div"); head.className = "soft";
    head.textContent = "step " + Math.round(nearest).toLocaleString(); tip.append(head);
    const text = v => data.percent ? (100 * v).toFixed(1) + "%" : String(+v.toPrecision(4));
    for (const [s, y] of rows) {
      const row = document.createElement("div"), name = document.createElement("span");
      name.className = "k" + s.colour; name.textContent = "■ ";
      row.append(name, (s.label ? s.label + " " : "") + text(y)); tip.append(row);
    }
    figure.append(tip);
    const outer = figure.getBoundingClientRect(), gap = event.clientX - outer.left;
    tip.style.left = Math.max(4, gap > outer.width / 2 ? gap - tip.offsetWidth - 14 : gap + 14) + "px";
    tip.style.top = (svg.getBoundingClientRect().top - outer.top + 8) + "px";
  };
  const end = event => {
    const range = [from, at(event)].map(step).sort((a, b) => a - b), wide = box && +box.getAttribute("width") > 6;
    box?.remove(); from = box = null;
    if (wide) zoomAll(range);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", event => {
    move(event);
    if (event.pointerType === "touch" || event.button) return;
    from = Math.min(Math.max(at(event), left), right);
    svg.setPointerCapture(event.pointerId); event.preventDefault();
  });
  svg.addEventListener("pointerup", event => { if (from !== null) end(event); });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("dblclick", () => zoomAll(null));
  return zoom;
}
const charts = [...document.querySelectorAll("svg[data-hover]")].map(chart), back = document.getElementById("all-steps");
function zoomAll(range) {
  for (const zoom of charts) zoom(range);
  back.hidden = !range;
  if (range) back.textContent = `steps ${range.map(x => Math.round(x).toLocaleString()).join(" to ")} · show all`;
}
back.addEventListener("click", () => zoomAll(null));
