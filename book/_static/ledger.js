/* Filters for the claims ledger. The table is complete without this file; the state lives in the URL's hash. */
(function () {
  "use strict";
  var form = document.querySelector("form.tq-filter");
  var rows = Array.prototype.slice.call(document.querySelectorAll("table.tq-ledger tbody tr"));
  if (!form || !rows.length) return;
  var fields = ["seed", "kind", "verdict", "q"];
  var output = form.querySelector("output");
  var FIRST = "0"; /* the document that is shown to who has asked for nothing: the whitepaper */
  var widened = false; /* whether a search has left that document by itself */
  var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });

  function state() {
    var found = {};
    fields.forEach(function (name) { found[name] = form.elements[name].value.trim(); });
    return found;
  }

  function matches(row, text, wanted) {
    return (!wanted.seed || row.dataset.seed === wanted.seed) &&
      (!wanted.verdict || row.dataset.verdict === wanted.verdict) &&
      (!wanted.kind || row.dataset.kind.split(" ").indexOf(wanted.kind) >= 0) &&
      wanted.q.toLowerCase().split(/\s+/).every(function (word) { return text.indexOf(word) >= 0; });
  }

  function apply() {
    var wanted = state(), shown = 0;
    rows.forEach(function (row, i) {
      var show = matches(row, texts[i], wanted);
      row.hidden = !show;
      if (show) shown += 1;
    });
    output.textContent = shown === rows.length ? rows.length + " claims" : shown + " of " + rows.length + " claims";
  }

  function remember() {
    var wanted = state(), params = new URLSearchParams();
    fields.forEach(function (name) { if (wanted[name]) params.set(name, wanted[name]); });
    if (!wanted.seed) params.set("seed", "all");
    if (params.toString() === "seed=" + FIRST) params.delete("seed");
    var hash = params.toString();
    history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
  }

  function read() {
    var hash = location.hash.slice(1);
    var target = hash && document.getElementById(hash);
    if (target && rows.indexOf(target) < 0) return; /* a heading of the page: the filters stay */
    /* Links from other pages read #verdict-0-not-yet: the theme takes the hash of every link for a CSS selector. */
    var link = /^verdict-([0-9T])-([a-z-]+)$/.exec(hash);
    if (hash && !target && !link && hash.indexOf("=") < 0) return;
    var asked = target ? { seed: target.dataset.seed } : link ? { seed: link[1], verdict: link[2].replace(/-/g, " ") } : hash;
    var params = new URLSearchParams(asked || { seed: FIRST });
    fields.forEach(function (name) {
      form.elements[name].value = params.get(name) || "";
      if (form.elements[name].selectedIndex === -1) form.elements[name].value = ""; /* no such choice */
    });
    apply();
    if (target) target.scrollIntoView({ block: "center", behavior: "instant" });
  }

  function changed(event) {
    if (event && event.target.name === "q") { /* a search is for every document, unless one was chosen */
      var seed = form.elements.seed, text = form.elements.q.value.trim();
      if (text && seed.value === FIRST && !form.elements.verdict.value) { seed.value = ""; widened = true; }
      if (!text && widened) { seed.value = FIRST; widened = false; }
    } else {
      widened = false;
    }
    apply();
    remember();
  }

  form.hidden = false;
  form.addEventListener("input", changed);
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  form.addEventListener("reset", function () { setTimeout(function () { changed(); }, 0); });
  window.addEventListener("hashchange", read);
  window.addEventListener("load", read); /* what loaded late has moved the row */
  read();
  apply();
})();
