// Renews the figures of an open page. Without this script the page shows them as of when it was loaded.
(() => {
  "use strict";
  const main = document.querySelector("main[data-renew-ms]"), rendered = document.getElementById("rendered");
  const row = document.getElementById("renewal"), button = row.querySelector("button"), connection = document.getElementById("connection");
  let timer = 0, isRunning = false, isHeld = false;

  const isSelected = one => !getSelection().isCollapsed && getSelection().containsNode(one, true);
  const isFilled = one => one.type !== "hidden" && (one.value !== one.defaultValue || one.checked !== one.defaultChecked);
  const isInUse = one => one.contains(document.activeElement) || isSelected(one) || [...one.querySelectorAll("input, textarea")].some(isFilled);

  // What an element is about: elements of the same name are one, before and after a renewal.
  const nameOf = one => {
    if (one.nodeType !== Node.ELEMENT_NODE) return one.nodeName;
    const about = one.id || one.dataset.key || one.getAttribute("action") || one.getAttribute("aria-labelledby") || one.getAttribute("aria-label")
      || (one.matches("tr") && one.querySelector("th[scope=row]")?.textContent) || "";
    const kept = one.matches("[data-kept]") ? "kept" : "";
    const sent = one.matches("form") ? [...one.querySelectorAll("input[type=hidden]:not([name=form_token])")].map(each => each.value) : [];
    return [one.nodeName, kept, about, ...sent].join("\n");
  };
  const byName = nodes => {
    const found = new Map(), counts = new Map();
    for (const one of nodes) {
      const name = nameOf(one), count = counts.get(name) ?? 0;
      counts.set(name, count + 1);
      found.set(`${count}\n${name}`, one);
    }
    return found;
  };

  const renewNode = (old, fresh) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue && !isSelected(old)) old.nodeValue = fresh.nodeValue;
    } else if (!old.matches("input, textarea, [data-kept]") && !(old.matches("form") && isInUse(old))) {
      for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !/^(open|style|data-)/.test(name)) old.removeAttribute(name);
      for (const one of fresh.attributes) if (old.getAttribute(one.name) !== one.value) old.setAttribute(one.name, one.value);
      renewChildren(old, fresh);
    }
  };
  const renewChildren = (old, fresh) => {
    const known = byName(old.childNodes), wanted = byName(fresh.childNodes), kept = new Set();
    for (const [name, one] of known) {
      if (wanted.has(name)) continue;
      if (one.nodeType === Node.ELEMENT_NODE && (one.matches("[data-kept]") || isInUse(one))) kept.add(one);
      else one.remove();
    }
    let at = old.firstChild;
    for (const [name, one] of wanted) {
      while (kept.has(at)) at = at.nextSibling;
      const same = known.get(name);
      if (same && same === at) at = at.nextSibling;
      else old.insertBefore(same ?? document.importNode(one, true), at);
      if (same) renewNode(same, one);
    }
  };

  const say = text => { if (connection.textContent !== text) connection.textContent = text; };
  const renewPage = async () => {
    const request = {headers: {"Millstream-Renewal": "1"}, redirect: "manual", signal: AbortSignal.timeout(30_000)};
    const answer = await fetch(location.href, request), page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const focused = document.activeElement, since = `The figures are of ${rendered.textContent}`;
    if (answer.type === "opaqueredirect" || answer.status === 401) return say(`${since}: reload the page to log in again.`);
    if (!answer.ok) return say(`${since}: ${page.querySelector(".problem")?.textContent ?? answer.status}`);
    if (!answer.headers.has("Millstream-Renew-After-Ms")) return say(`${since}: reload the page.`); // not of the console
    if (isHeld) return say("");
    renewNode(main, page.querySelector("main"));
    if (focused !== document.activeElement && focused.isConnected) focused.focus({preventScroll: true}); // it was moved
    rendered.textContent = page.getElementById("rendered").textContent;
    say("");
    return Number(answer.headers.get("Millstream-Renew-After-Ms")) + 50;
  };
  const renew = async () => {
    clearTimeout(timer);
    if (isRunning || isHeld || document.hidden) return;
    isRunning = true;
    const afterMs = await renewPage().catch(() => say(`No connection to the console since ${rendered.textContent}. The page tries again.`));
    isRunning = false;
    timer = setTimeout(renew, afterMs ?? Number(main.dataset.renewMs));
  };

  row.hidden = false;
  button.addEventListener("click", () => {
    isHeld = !isHeld;
    button.setAttribute("aria-pressed", String(isHeld));
    renew();
  });
  document.addEventListener("visibilitychange", renew);
  timer = setTimeout(renew, Number(main.dataset.renewMs));
})();
