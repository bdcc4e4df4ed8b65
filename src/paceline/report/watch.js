// Renews the content of a live page without a reload: scroll positions and open parts stay.
"use strict";
(() => {
  const every = 2000;
  const main = document.querySelector("main");
  const address = location.pathname.replace(/\/$/, "") + "/content";
  let version = "";
  let lost = 0;

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
      main.innerHTML = content;
      main.querySelectorAll("details").forEach((part, n) => { part.open = Boolean(open[n]); });
      main.querySelectorAll(".scroll").forEach((part, n) => { part.scrollLeft = scrolled[n] || 0; });
    } catch (error) {
      lost += 1;
      if (lost > 1) state("lost");
    }
  }

  async function loop() {
    await renew();
    // A page in the background sends fewer requests.
    setTimeout(loop, document.hidden ? 5 * every : every);
  }
  state("on");
  loop();
})();
