// One switch for the folded code of a page, and heads for the cards that tables become on a phone. Without this script
// every cell keeps its own fold, and cards have no heads.
(() => {
  const KEY = "tq-code", html = document.documentElement;
  const remembered = () => { try { return localStorage.getItem(KEY) === "shown"; } catch { return false; } };
  const remember = shown => { try { localStorage.setItem(KEY, shown ? "shown" : "folded"); } catch { /* a disk */ } };

  document.addEventListener("DOMContentLoaded", () => {
    const cells = [...document.querySelectorAll("details.hide.above-input")];
    const title = document.querySelector("article h1");
    if (!cells.length || !title) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "tq-code-switch";
    const set = shown => {
      html.classList.toggle("tq-code-folded", !shown);
      cells.forEach(cell => { cell.open = shown; });
      button.textContent = shown ? "Hide the code of figures and tables" : "Show all code";
      button.setAttribute("aria-pressed", String(shown));
    };
    button.addEventListener("click", () => {
      const shown = html.classList.contains("tq-code-folded");
      set(shown);
      remember(shown);
    });
    const after = title.parentElement.querySelector(":scope > details.tq-recordings") ?? title;
    after.insertAdjacentElement("afterend", button);
    set(remembered());
  });

  document.addEventListener("DOMContentLoaded", () => {
    // What scrolls must be reachable with a keyboard.
    for (const box of document.querySelectorAll(".pst-scrollable-table-container")) box.tabIndex = 0;
    for (const table of document.querySelectorAll("table.tq-cards, table.tq-data")) {
      const heads = [...table.querySelectorAll("thead th")].map(head => head.textContent.trim());
      for (const row of table.querySelectorAll("tbody tr")) {
        [...row.children].forEach((cell, column) => { if (column && heads[column]) cell.dataset.label = heads[column]; });
      }
    }
  });
})();
