// Episodes by task, text, reward and outcome.
const filter = document.getElementById("filter");
if (filter) {
  const list = document.getElementById("episode-list"), all = [...list.children];
  const texts = new Map(all.map(item => [item, item.textContent.toLowerCase()]));
  const show = () => {
    const want = Object.fromEntries(new FormData(filter)), key = want.order.replace("-", "");
    const sign = want.order.startsWith("-") ? -1 : 1;
    let count = 0;
    for (const item of all.sort((a, b) => sign * (a.dataset[key] - b.dataset[key]))) {
      const d = item.dataset, shown = d.task.includes(want.task.trim().toLowerCase())
        && texts.get(item).includes(want.text.toLowerCase())
        && (want.low === "" || +d.reward >= +want.low) && (want.high === "" || +d.reward <= +want.high)
        && (!want.passed || d.passed === want.passed);
      item.hidden = !shown; count += shown;
    }
    list.append(...all);
    filter.querySelector("output").textContent = `${count} of ${all.length}`;
  };
  filter.addEventListener("input", show);
  filter.addEventListener("submit", event => event.preventDefault());
  filter.hidden = false; show();
}

// A comparison: settings to be hidden, or told from the others while the pointer is on their name.
const marks = s => document.querySelectorAll(`svg [data-s="${s}"]`);
for (const row of document.querySelectorAll(".key [data-s]")) {
  const s = +row.dataset.s, box = row.querySelector("input");
  const follow = () => {
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
