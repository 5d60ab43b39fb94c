// What a script adds to a page that works without one: the theme's switch, sorting, copying, the read-out under the
// pointer, and folded lists that unfold on paper. Text is only ever set as text.
"use strict";
(() => {
  const root = document.documentElement;
  root.dataset.script = "on";

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();

  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const text = (row) => row.cells[column].textContent.trim();
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => (up ? 1 : -1) * text(a).localeCompare(text(b), "en", { numeric: true }));
        table.tBodies[0].append(...rows);
      });
    });
  }

  for (const chart of document.querySelectorAll("svg[data-readout]")) {
    const data = JSON.parse(chart.dataset.readout);
    if (!data.x.length) continue;
    const cursor = chart.querySelector(".cursor");
    const line = document.createElement("p");
    line.className = "readout";
    chart.before(line);
    line.title = "Point at the curve, or focus it and use the arrow keys, to read other steps.";
    const last = data.x.length - 1;
    let at = last;
    const rest = () => { show(last); cursor.setAttribute("visibility", "hidden"); };
    const show = (index) => {
      at = Math.max(0, Math.min(last, index));
      const left = (100 * (data.x[at] - data.low)) / (data.high - data.low) + "%";
      cursor.setAttribute("x1", left);
      cursor.setAttribute("x2", left);
      cursor.setAttribute("visibility", "visible");
      line.replaceChildren(`${data.name} ${data.x[at].toLocaleString("en")}`);
      for (const column of data.columns) {
        const value = document.createElement("b");
        value.textContent = column.values[at];
        line.append(" · ", column.name, " ", value);
      }
    };
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const want = data.low + ((event.clientX - box.left) / box.width) * (data.high - data.low);
      let best = 0;
      data.x.forEach((x, i) => { if (Math.abs(x - want) < Math.abs(data.x[best] - want)) best = i; });
      show(best);
    });
    chart.addEventListener("pointerleave", rest);
    chart.setAttribute("tabindex", "0");
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (step) { event.preventDefault(); show(at + step); }
    });
    chart.addEventListener("focus", () => { if (chart.matches(":focus-visible")) show(at); });
    chart.addEventListener("blur", rest);
    rest();
  }

  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details:not(.numbers, .more):not([open])")) {
      fold.open = true;
      fold.dataset.printed = "yes";
    }
  });
  addEventListener("afterprint", () => {
    for (const fold of document.querySelectorAll("details[data-printed]")) {
      fold.open = false;
      delete fold.dataset.printed;
    }
  });
})();
