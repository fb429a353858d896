/* Keeps the live parts of a page fresh: a stream of events says when, the server says what. */
(() => {
  "use strict";
  const main = document.querySelector("main[data-events]");
  if (!main) return;
  const PAUSE_MS = 1000;
  const END_MS = 2000;
  const shown = new Map();
  let source = null;
  let last = "";
  let wanted = false;
  let asking = false;

  const tell = (text) => { document.getElementById("live-state").textContent = text; };

  const put = (fresh) => {
    const old = document.getElementById(fresh.id);
    const text = fresh.outerHTML;
    if (!old || shown.get(fresh.id) === text) return;
    shown.set(fresh.id, text);
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    const open = [...old.querySelectorAll("details[open][id]")].map((part) => part.id);
    const scrolled = [...old.querySelectorAll(".scroll[id]")].map((part) => [part.id, part.scrollLeft]);
    old.replaceWith(fresh);
    for (const id of open) { const part = document.getElementById(id); if (part) part.open = true; }
    for (const [id, left] of scrolled) { const part = document.getElementById(id); if (part) part.scrollLeft = left; }
    if (focused) { const part = document.getElementById(focused); if (part) part.focus({ preventScroll: true }); }
  };

  const ask = async () => {
    if (asking) { wanted = true; return; }
    asking = true;
    wanted = false;
    try {
      const answer = await fetch(main.dataset.live, { headers: { Accept: "text/html" } });
      if (answer.status === 401) { source.close(); tell("The session has ended: run `ablate open` again."); return; }
      if (answer.ok) {
        const made = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of made.querySelectorAll("body > section[id]")) put(document.importNode(part, true));
        main.dataset.fresh = String(Number(main.dataset.fresh || 0) + 1);
      }
    } catch {
      tell("The service does not answer; trying again.");
    } finally {
      setTimeout(() => { asking = false; if (wanted) ask(); }, PAUSE_MS);
    }
  };

  const KINDS = ["changed", "ablation.state", "ablation.priority", "block.state", "trial.state", "trial.progress",
    "attempt.state", "verdict"];
  const follow = () => {
    const address = new URL(main.dataset.events, location.href);
    if (last) address.searchParams.set("after", last);
    source = new EventSource(address);
    for (const kind of KINDS) source.addEventListener(kind, (event) => { last = event.lastEventId; ask(); });
    source.addEventListener("open", () => { tell("Live."); main.dataset.open = "yes"; });
    source.addEventListener("error", () => {
      tell(source.readyState === EventSource.CLOSED ? "Not live any more; reload the page." : "Not connected; trying again.");
    });
    source.addEventListener("end", () => { source.close(); tell("Over; its report is being written."); setTimeout(() => location.reload(), END_MS); });
  };
  const rest = () => { source.close(); main.dataset.open = "no"; };

  follow();
  /* A browser keeps six connections to a server: tabs that nobody looks at hold none. */
  document.addEventListener("visibilitychange", () => { if (document.hidden) rest(); else { follow(); ask(); } });
  const every = Number(main.dataset.every || 0);
  if (every) setInterval(() => { if (!document.hidden) ask(); }, 1000 * every);
})();
