"use strict";
// Sorting and filtering of tables, what follows them, and runs to look at more closely. Without this script all is still readable.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const text = (row) => row.dataset.text ??= row.textContent.toLowerCase();
  const collator = new Intl.Collator("en", { numeric: true });

  // Numbers by size, texts in the order of the alphabet; rows without a value last, whichever way.
  function compare(a, b, column, sign) {
    const [x, y] = [a.cells[column], b.cells[column]];
    const [empty, other] = [x, y].map((cell) => ["", "-"].includes(cell.textContent.trim()));
    if (empty || other) return empty - other;
    if (x.dataset.v !== undefined && y.dataset.v !== undefined) return sign * (x.dataset.v - y.dataset.v);
    return sign * collator.compare(x.textContent, y.textContent);
  }

  function limit(bars) {
    const most = bars.classList.contains("everything") ? Infinity : Number(bars.dataset.most);
    let shown = 0;
    for (const bar of all(":scope > .bar", bars)) bar.classList.toggle("more", !bar.hidden && ++shown > most);
  }

  function follow(box) {
    const rows = all("tbody tr[data-key]", box);
    for (const bars of all(`.bars[data-follows="${box.id}"]`)) {
      const own = new Map(all(":scope > .bar", bars).map((bar) => [bar.dataset.key, bar]));
      const end = bars.querySelector("figcaption");
      for (const row of rows) {
        const bar = own.get(row.dataset.key);
        if (!bar) continue;
        bar.hidden = row.hidden;
        bars.insertBefore(bar, end);
      }
      limit(bars);
    }
  }

  for (const box of all("div.table")) {
    const body = box.querySelector("tbody"), form = box.querySelector("form");
    const rows = () => [...body.rows];
    all("th", box).forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
      const numbers = rows().some((row) => row.cells[column].dataset.v !== undefined);
      const before = heading.getAttribute("aria-sort") ?? (numbers ? "ascending" : "descending");
      const ascending = before !== "ascending";
      for (const other of all("th", box)) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      body.append(...rows().sort((a, b) => compare(a, b, column, ascending ? 1 : -1)));
      follow(box);
    }));
    if (!form) continue;
    const noun = form.querySelector("output").textContent.replace(/^\d+ /, "");
    const filter = () => {
      const words = (form.querySelector("input")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = all("select", form).filter((select) => select.value !== "");
      let count = 0;
      for (const row of rows()) {
        row.hidden = !(words.every((word) => text(row).includes(word))
          && chosen.every((select) => row.cells[select.dataset.column].textContent === select.value));
        count += !row.hidden;
      }
      form.querySelector("output").textContent = count === rows().length ? `${count} ${noun}` : `${count} of ${rows().length} ${noun}`;
      follow(box);
    };
    for (const kind of ["input", "change"]) form.addEventListener(kind, filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    if (form.querySelector("input")?.value || all("select", form).some((select) => select.selectedIndex > 0)) filter();
  }

  // Runs that are not shown from the beginning lie packed in the page.
  let unpacked;
  async function unpack(script) {
    const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }
  async function found(key) {
    const there = document.getElementById(key);
    if (there) return there.closest(".look") === there ? there : null;
    unpacked ??= Promise.all(all("script.packed").map(async (script) => [script, await unpack(script)]));
    const entry = (await unpacked).find(([, texts]) => Object.hasOwn(texts, key));
    if (!entry) return null;
    const article = document.createElement("article");
    article.id = key;
    article.className = "look";
    article.innerHTML = entry[1][key];
    entry[0].previousElementSibling.prepend(article);
    return article;
  }

  // A run is put before those already shown, so that two can be compared.
  async function look(key) {
    const article = await found(key);
    if (!article) return;
    if (article.hidden) article.parentElement.prepend(article);
    article.hidden = false;
    article.scrollIntoView();
  }
  document.addEventListener("click", (event) => {
    const close = event.target.closest("button.close");
    if (close) close.closest(".look").hidden = true;
    const more = event.target.closest("button.all");
    if (more) {
      const bars = more.previousElementSibling;
      bars.classList.add("everything");
      limit(bars);
      more.remove();
    }
    const link = event.target.closest('a[href^="#"]');
    if (link) look(link.getAttribute("href").slice(1));
  });
  if (location.hash) look(location.hash.slice(1));
})();
