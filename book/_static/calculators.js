/* The calculators of the page: the closed forms of tq/economics/calculator.py, and the forms that show them.
   What the fields are and how results are written comes from the page (JSON). The state lives in the URL's hash. */
(function () {
  "use strict";
  var GBIT = 1e9 / 8, GIB = Math.pow(2, 30);

  function stored(x) { return x.bits + x.scale_bits / x.block; }

  function savings(x) {
    var ratio = x.base_bits / stored(x);
    if (x.gpus_per_replica > x.gpus) throw new Error("GPUs a replica must be at most all GPUs");
    if (ratio <= 1) throw new Error("bits with scales must be fewer than those of the gradients");
    var replicas = x.gpus / x.gpus_per_replica;
    var wire = 2 * (replicas - 1) / replicas * (x.parameters_b * 1e9 / x.gpus_per_replica) * x.base_bits / 8;

    function at(link, speed) {
      var compute = 6 * x.parameters_b * 1e9 * x.batch_m * 1e6 / (x.gpus * x.tflops * speed * 1e12);
      var hidden = x.overlap * compute, exchange = wire / (x.link_gbit * link * GBIT);
      var exposed = Math.max(exchange - hidden, 0), codedExposed = Math.max(exchange / ratio - hidden, 0);
      return { compute: compute, exchange: exchange, exposed: exposed, codedExposed: codedExposed,
        plain: compute + exposed, coded: compute * x.overhead + codedExposed };
    }

    var one = at(1, 1), fast = at(1 + x.uncertainty, 1 - x.uncertainty), slow = at(1 - x.uncertainty, 1 + x.uncertainty);
    var steps = x.tokens_b * 1e3 / x.batch_m, usd = x.gpus * x.usd_per_gpu_hour / 3600;
    var codec = (x.overhead - 1) * one.compute, hidden = x.overlap * one.compute;
    var when = hidden + codec <= ratio * hidden ? hidden + codec : codec / (1 - 1 / ratio);
    var limit = wire === 0 ? 0 : wire / GBIT / when;
    var low = 1 - fast.coded / fast.plain, high = 1 - slow.coded / slow.plain;
    return {
      ratio: ratio, compute_s: one.compute, exchange_s: one.exchange, share: one.exposed / one.plain,
      plain_s: one.plain, coded_s: one.coded, saving: 1 - one.coded / one.plain, saving_low: low, saving_high: high,
      plain_hours: steps * one.plain / 3600, coded_hours: steps * one.coded / 3600,
      plain_usd: steps * one.plain * usd, coded_usd: steps * one.coded * usd,
      saved_usd: steps * (one.plain - one.coded) * usd,
      saved_usd_low: steps * (fast.plain - fast.coded) * usd, saved_usd_high: steps * (slow.plain - slow.coded) * usd,
      breakeven_overhead: (one.plain - one.codedExposed) / one.compute,
      breakeven_gbit: isFinite(limit) ? limit : null,
      pays: low > 0 ? 1 : high <= 0 ? -1 : 0
    };
  }

  function memory(x) {
    if (x.hidden % x.heads) throw new Error("attention heads must divide the hidden width");
    if (x.heads % x.tp) throw new Error("tensor-parallel GPUs must divide the attention heads");
    if (x.pp > x.layers) throw new Error("pipeline stages must be at most the layers");
    var h = x.hidden, t = x.tp, s = x.seq, b = x.micro_batch, stage = Math.ceil(x.layers / x.pp);
    var layer = 12 * h * h + 13 * h, embedding = (x.vocab + s) * h;
    var numbers = (stage * layer + embedding) / t;
    var weights = 2 * numbers / (x.zero >= 3 ? x.dp : 1);
    var gradients = x.gradient_bytes * numbers / (x.zero >= 2 ? x.dp : 1);
    var states = 12 * numbers / (x.zero >= 1 ? x.dp : 1);
    var gathered = x.zero >= 3 ? 2 * numbers / stage : 0;
    var split = x.sequence_parallel ? t : 1, scores = 5 * x.heads * s / t, whole = 10 * h / split + 24 * h / t + scores;
    var both = [[whole, 0], [whole - scores, scores], [2 * h / split, whole]][x.recompute];
    var kept = both[0], working = both[1];
    var held = stage * Math.min(x.micro_batches, x.pp) * s;
    var logits = x.pp === 1 ? s * (4 * h + 4 * x.vocab) / t : 0;
    var smaller = 1 - x.coded + x.coded * stored(x) / 16;
    var fixed = weights + gradients + states + gathered;
    var codedWorking = s * (x.coded > 0 ? Math.max(working, kept) : working);
    var plainEach = held * kept + s * working + logits, codedEach = held * kept * smaller + codedWorking + logits;
    var room = (x.gpu_gib - x.reserve_gib) * GIB - fixed;
    return {
      parameters_b: (x.layers * layer + embedding) / 1e9,
      weights_gib: weights / GIB, gradients_gib: gradients / GIB, states_gib: states / GIB,
      activations_gib: b * held * kept / GIB, coded_activations_gib: b * held * kept * smaller / GIB,
      working_gib: (b * (s * working + logits) + gathered) / GIB,
      coded_working_gib: (b * (codedWorking + logits) + gathered) / GIB,
      total_gib: (fixed + b * plainEach) / GIB, coded_total_gib: (fixed + b * codedEach) / GIB,
      largest_batch: Math.max(0, Math.floor(room / plainEach)),
      coded_largest_batch: Math.max(0, Math.floor(room / codedEach))
    };
  }

  function codec(x, distortion) {
    var block = Math.ceil(x.block * x.bits / 8) + x.scale_bits / 8;
    var bytes = Math.ceil(x.numbers / x.block) * block, d = distortion[x.bits];
    return {
      bits_per_element: block * 8 / x.block, bytes: bytes, bytes_fp32: 4 * x.numbers, bytes_bf16: 2 * x.numbers,
      ratio_fp32: 4 * x.numbers / bytes, ratio_bf16: 2 * x.numbers / bytes,
      nmse: d, nmse_unbiased: d / (1 - d), nmse_floor: Math.pow(4, -x.bits), snr_db: -10 * Math.log10(d)
    };
  }

  var FORMULAS = { savings: savings, memory: memory, codec: codec };

  /* A number as the field accepts it, or an error that says what it accepts. */
  function check(field, value) {
    var listed = field.choices.map(function (choice) { return choice[0]; });
    var good = typeof value === "number" && value >= field.low && value <= field.high;
    if (good && field.whole) good = value === Math.floor(value);
    if (good && listed.length) good = listed.indexOf(value) >= 0;
    if (good) return value;
    var accepted = listed.length ? "one of " + listed.join(", ")
      : (field.whole ? "a whole number" : "a number") + " from " + field.low + " to " + field.high;
    throw new Error(field.label + ": " + accepted);
  }

  function calculate(data, name, given) {
    var x = {};
    data.fields[name].forEach(function (field) { x[field.name] = check(field, given[field.name]); });
    return FORMULAS[name](x, data.distortion);
  }

  function shown(value, form) {
    if (value === null || value === undefined) return "none";
    if (form === "percent") return (100 * value).toFixed(1).replace("-", "−") + " %";
    if (form === "pays") return value > 0 ? "yes" : value < 0 ? "no" : "depends on link and speed";
    if (form === "usd") return (value < 0 ? "−$" : "$") + Math.round(Math.abs(value)).toLocaleString("en-US");
    if (form === "count") return Math.round(value).toLocaleString("en-US");
    if (form === "fixed") return value.toFixed(2);
    return value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3) ? value.toExponential(3)
      : String(Number(value.toPrecision(4)));
  }

  window.TQCalculators = { calculate: calculate };

  /* --- the forms ------------------------------------------------------------------------------------------- */

  var source = document.getElementById("tq-calculators");
  if (!source) return;
  var data = JSON.parse(source.textContent);
  var forms = Array.prototype.slice.call(document.querySelectorAll("form.tq-calculator"));

  function number(text) { return text.trim() === "" ? NaN : Number(text); }

  function values(form) {
    var found = {};
    data.fields[form.dataset.name].forEach(function (field) {
      found[field.name] = number(form.elements[field.name].value);
    });
    return found;
  }

  function update(form) {
    var problem = form.querySelector(".tq-problem"), found = null, given = values(form);
    data.fields[form.dataset.name].forEach(function (field) {
      var input = form.elements[field.name];
      try { check(field, given[field.name]); input.removeAttribute("aria-invalid"); }
      catch (error) { input.setAttribute("aria-invalid", "true"); }
    });
    try { found = calculate(data, form.dataset.name, given); problem.textContent = ""; }
    catch (error) { problem.textContent = error.message; }
    Array.prototype.forEach.call(form.querySelectorAll("output[data-key]"), function (output) {
      output.textContent = found ? shown(found[output.dataset.key], output.dataset.form) : "–";
    });
  }

  /* Only what differs from the opening case stands in the URL: #savings.link_gbit=25&memory.tp=4 */
  function remember() {
    var params = new URLSearchParams();
    forms.forEach(function (form) {
      data.fields[form.dataset.name].forEach(function (field) {
        var value = number(form.elements[field.name].value);
        if (isFinite(value) && value !== field["default"]) params.set(form.dataset.name + "." + field.name, String(value));
      });
    });
    var hash = params.toString();
    history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
    forms.forEach(function (form) { form.elements.link.value = location.href; });
  }

  function read() {
    var hash = location.hash.slice(1);
    if (hash && hash.indexOf("=") < 0) hash = ""; /* a heading of the page */
    var params = new URLSearchParams(hash);
    forms.forEach(function (form) {
      data.fields[form.dataset.name].forEach(function (field) {
        var text = params.get(form.dataset.name + "." + field.name), input = form.elements[field.name];
        input.value = text === null || !isFinite(number(text)) ? field["default"] : text;
        if (input.selectedIndex === -1) input.value = field["default"]; /* no such choice */
      });
      form.elements.link.value = location.href;
      update(form);
    });
  }

  forms.forEach(function (form) {
    form.hidden = false;
    form.addEventListener("input", function (event) {
      var preset = event.target.name === "preset" && (data.presets[form.dataset.name] || {})[event.target.value];
      if (preset) Object.keys(preset).forEach(function (key) { form.elements[key].value = preset[key]; });
      if (event.target.name === "link") return;
      if (!preset && form.elements.preset) form.elements.preset.value = "";
      update(form);
      remember();
    });
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.addEventListener("reset", function () { setTimeout(function () { update(form); remember(); }, 0); });
    form.elements.link.addEventListener("focus", function () { form.elements.link.select(); });
  });
  window.addEventListener("hashchange", read);
  if (forms.length) read();
})();
