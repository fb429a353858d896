/* Replaces the live sections of a page after each event of the stream, with HTML from the server. */
(() => {
  "use strict";
  const main = document.querySelector("main[data-events]");
  if (!main) return;
  const PAUSE_MS = 1000;
  const END_MS = 2000;
  const shown = new Map();
  let source = null;
  let last = "";
  let again = false;
  let loading = false;

  const report = (text) => { document.getElementById("live-state").textContent = text; };

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

  const load = async () => {
    if (loading) { again = true; return; }
    loading = true;
    again = false;
    try {
      const answer = await fetch(main.dataset.live, { headers: { Accept: "text/html" } });
      if (answer.status === 401) { source.close(); report("The session has ended: run `ablate open` again."); return; }
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of page.querySelectorAll("body > section[id]")) put(document.importNode(part, true));
        main.dataset.fresh = String(Number(main.dataset.fresh || 0) + 1);
      }
    } catch {
      report("The service does not answer; trying again.");
    } finally {
      setTimeout(() => { loading = false; if (again) load(); }, PAUSE_MS);
    }
  };

  const KINDS = ["changed", "ablation.state", "ablation.priority", "block.state", "block.waits", "trial.state",
    "trial.progress", "attempt.state", "verdict"];
  const follow = () => {
    const address = new URL(main.dataset.events, location.href);
    if (last) address.searchParams.set("after", last);
    source = new EventSource(address);
    for (const kind of KINDS) source.addEventListener(kind, (event) => { last = event.lastEventId; load(); });
    source.addEventListener("open", () => { report("Live."); main.dataset.open = "yes"; });
    source.addEventListener("error", () => {
      report(source.readyState === EventSource.CLOSED ? "No longer live; reload the page." : "Not connected; trying again.");
    });
    source.addEventListener("end", () => { source.close(); report("Over; its report is being written."); setTimeout(() => location.reload(), END_MS); });
  };
  const pause = () => { source.close(); main.dataset.open = "no"; };

  follow();
  /* A browser opens at most six connections to a server, so hidden tabs close theirs. */
  document.addEventListener("visibilitychange", () => { if (document.hidden) pause(); else { follow(); load(); } });
  const every = Number(main.dataset.every || 0);
  if (every) setInterval(() => { if (!document.hidden) load(); }, 1000 * every);
})();
