// Renews the content of a live page without a reload: positions, open parts and selections stay.
"use strict";
(() => {
  const every = 2000;
  const main = document.querySelector("main");
  const address = location.pathname.replace(/\/$/, "") + "/content";
  let version = "";
  let lost = 0;

  // Of the page of several runs: how the user has arranged it.
  let sorted = null;
  let words = [];

  function arrange() {
    const body = main.querySelector(".overview tbody");
    if (!body) return;
    const rows = [...body.rows];
    if (sorted) {
      const key = (row) => {
        const cell = row.cells[sorted.column];
        return cell.dataset.value === undefined ? cell.innerText : cell.dataset.value;
      };
      // Unknown values come last.
      const compare = (a, b) => (a === "") - (b === "") || sorted.sign *
        (isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
      body.append(...rows.sort((a, b) => compare(key(a), key(b))));
      main.querySelectorAll(".overview th").forEach((head, n) => {
        const own = n === sorted.column;
        head.ariaSort = own ? (sorted.sign > 0 ? "ascending" : "descending") : null;
      });
    }
    const shown = new Set(rows.filter((row) => {
      const text = row.innerText.toLowerCase();
      return words.every((word) => text.includes(word));
    }).map((row) => row.dataset.run));
    main.querySelectorAll("[data-run]").forEach((part) => {
      part.toggleAttribute("hidden", !shown.has(part.dataset.run));
    });
  }

  function highlight(run) {
    main.querySelectorAll(".chart [data-run]").forEach((part) => {
      part.classList.toggle("dim", run !== undefined && part.dataset.run !== run);
    });
  }

  main.addEventListener("click", (event) => {
    const head = event.target.closest(".overview th");
    if (!head) return;
    const column = head.cellIndex;
    // The largest number first, the first letter first.
    const first = head.className === "text" ? 1 : -1;
    sorted = { column, sign: sorted && sorted.column === column ? -sorted.sign : first };
    arrange();
  });
  main.addEventListener("input", (event) => {
    words = event.target.value.toLowerCase().split(/\s+/);
    arrange();
  });
  main.addEventListener("pointerover", (event) => {
    const row = event.target.closest(".overview tr");
    highlight(row ? row.dataset.run : undefined);
  });

  function state(text) {
    document.documentElement.dataset.live = text;
  }

  async function renew() {
    try {
      const answer = await fetch(address + "?have=" + encodeURIComponent(version), { cache: "no-store" });
      if (!answer.ok && answer.status !== 204) throw new Error(String(answer.status));
      lost = 0;
      state("on");
      if (answer.status === 204) return;
      const content = await answer.text();
      version = answer.headers.get("X-Version") || "";
      document.title = decodeURIComponent(answer.headers.get("X-Title") || "") || document.title;
      const open = [...main.querySelectorAll("details")].map((part) => part.open);
      const scrolled = [...main.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
      const input = main.querySelector(".filter input");
      const typing = input !== null && document.activeElement === input;
      main.innerHTML = content;
      const other = main.querySelector(".filter input");
      if (input && other) other.replaceWith(input);
      if (typing) input.focus();
      arrange();
      main.querySelectorAll("details").forEach((part, n) => { part.open = Boolean(open[n]); });
      main.querySelectorAll(".scroll").forEach((part, n) => { part.scrollLeft = scrolled[n] || 0; });
    } catch (error) {
      lost += 1;
      if (lost > 1) state("lost");
    }
  }

  async function loop() {
    await renew();
    // A page in the background asks for nothing.
    setTimeout(loop, document.hidden ? 5 * every : every);
  }
  state("on");
  loop();
})();
