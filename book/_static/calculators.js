/* The calculators of the page: the closed forms of tq/economics/savings.py and calculator.py, and their forms.
   What the fields are and how results are written comes from the page (JSON). The state lives in the URL's hash. */
(function () {
  "use strict";
  var GBIT = 1e9 / 8, GIB = Math.pow(2, 30);

  function stored(x) { return x.bits + x.scale_bits / x.block; }

  /* Seconds of a step with and without codes, for one draw of the uncertain inputs (`_times` in savings.py). */
  function step(x, drawn) {
    var replicas = x.gpus / x.gpus_per_replica, numbers = x.parameters_b * 1e9 / x.gpus_per_replica;
    var local = Math.max(1, Math.floor(8 / x.gpus_per_replica)), nodes = Math.max(replicas / local, 1);
    var part = (nodes - 1) / nodes * numbers / local / 8, code = stored(x), rate = x.link_gbit * drawn.reach * GBIT;
    var compute = 6 * x.parameters_b * 1e9 * x.batch_m * 1e6 / (x.gpus * drawn.tflops * 1e12);
    var cover = drawn.overlap * compute, passes = replicas <= 1 ? 0 : x.zero ? 2 : 3 + 1 / replicas;
    /* gradients hide behind the backward pass alone, ZeRO-1's weights behind the next forward pass */
    var gradients = part * x.base_bits * (x.zero ? 1 : 2) / rate, coded = gradients * code / x.base_bits;
    var weights = x.zero ? part * 16 / rate : 0;
    function waits(sent) { return Math.max(sent - 2 / 3 * cover, 0) + Math.max(weights - cover / 3, 0); }
    var codec = passes * numbers / (drawn.codec_g * 1e9);
    return { compute: compute, exchange: gradients + weights, codedExchange: coded + weights,
      exposed: waits(gradients), codedExposed: waits(coded), codec: codec,
      plain: compute + waits(gradients), coded: compute + codec + waits(coded) };
  }

  var UNCERTAIN = ["tflops", "reach", "overlap", "codec_g"], SAMPLES = 1000, root = 2;
  for (var turn = 0; turn < 60; turn++) root = Math.pow(1 + root, 1 / (UNCERTAIN.length + 1));

  /* The same evenly spread draws as in Python: half below the expected value, half above. */
  function sampled(x) {
    var found = [];
    for (var i = 1; i <= SAMPLES; i++) {
      var drawn = {};
      UNCERTAIN.forEach(function (name, j) {
        var u = (0.5 + i * Math.pow(root, -(j + 1))) % 1, low = x[name + "_low"], mid = x[name], high = x[name + "_high"];
        if (name === "codec_g") { low = Math.log(low); mid = Math.log(mid); high = Math.log(high); }
        drawn[name] = u < 0.5 ? low + (mid - low) * 2 * u : mid + (high - mid) * (2 * u - 1);
        if (name === "codec_g") drawn[name] = Math.exp(drawn[name]);
      });
      found.push(step(x, drawn));
    }
    return found;
  }

  function quantiles(values, shares) {
    var sorted = values.slice().sort(function (a, b) { return a - b; });
    return shares.map(function (q) {
      var at = q * (sorted.length - 1), low = Math.floor(at), next = Math.min(low + 1, sorted.length - 1);
      return sorted[low] + (at - low) * (sorted[next] - sorted[low]);
    });
  }

  function saving(one) { return 1 - one.coded / one.plain; }

  /* The link above which codes do not pay, by bisection: the gain falls as the link gets faster. */
  function breakeven(x, codec) {
    function gain(gbit) {
      var found = step(Object.assign({}, x, { link_gbit: gbit }), x);
      return found.exposed - found.codedExposed;
    }
    var low = 1e-6, high = 1e12;
    if (gain(low) <= codec) return 0;
    if (gain(high) > codec || codec === 0) return Infinity;
    for (var turn = 0; turn < 200; turn++) {
      var middle = Math.sqrt(low * high);
      if (gain(middle) > codec) low = middle; else high = middle;
    }
    return Math.sqrt(low * high);
  }

  function savings(x) {
    var ratio = x.base_bits / stored(x);
    if (x.gpus_per_replica > x.gpus) throw new Error("GPUs per replica must be at most all GPUs");
    if (ratio <= 1) throw new Error("bits with scales must be fewer than those of the gradients");
    UNCERTAIN.forEach(function (name) {
      if (!(x[name + "_low"] <= x[name] && x[name] <= x[name + "_high"])) {
        throw new Error(labels()[name] + " must lie between its low and its high end");
      }
    });
    var one = step(x, x), many = sampled(x), gain = one.exposed - one.codedExposed;
    var steps = x.tokens_b * 1e3 / x.batch_m, usd = x.gpus * x.usd_per_gpu_hour / 3600;
    var ends = quantiles(many.map(saving), [0.1, 0.9, 0.5]);
    var sums = quantiles(many.map(function (each) { return each.plain - each.coded; }), [0.1, 0.9]);
    var chance = many.filter(function (each) { return saving(each) > 0; }).length / SAMPLES;
    var limit = breakeven(x, one.codec);
    return {
      ratio: ratio, compute_s: one.compute, exchange_s: one.exchange, coded_exchange_s: one.codedExchange,
      codec_s: one.codec, share: one.exposed / one.plain, plain_s: one.plain, coded_s: one.coded,
      saving: saving(one), saving_low: ends[0], saving_high: ends[1], saving_median: ends[2], chance: chance,
      plain_hours: steps * one.plain / 3600, coded_hours: steps * one.coded / 3600,
      plain_usd: steps * one.plain * usd, coded_usd: steps * one.coded * usd,
      saved_usd: steps * (one.plain - one.coded) * usd,
      saved_usd_low: steps * sums[0] * usd, saved_usd_high: steps * sums[1] * usd,
      breakeven_gbit: isFinite(limit) ? limit : null, breakeven_codec_g: gain > 0 ? one.codec * x.codec_g / gain : null,
      pays: chance >= 0.8 ? 1 : chance <= 0.2 ? -1 : 0
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
    if (form === "pays") return value > 0 ? "yes" : value < 0 ? "no" : "uncertain";
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

  function labels() {
    var found = {};
    data.fields.savings.forEach(function (field) { found[field.name] = field.label; });
    return found;
  }

  /* --- the plot of the savings form: the saving against the link, with the case marked ------------------------ */

  var LINKS = [], WIDE = 640, TALL = 300, LEFT = 48, RIGHT = 12, TOP = 10, BOTTOM = 42, MOST = 0.7, LEAST = -0.3;
  for (var half = 0; half <= 24; half++) LINKS.push(5 * Math.pow(320, half / 24)); /* 5 to 1,600 Gbit/s */

  function across(gbit) { return LEFT + (WIDE - LEFT - RIGHT) * Math.log(gbit / 5) / Math.log(320); }
  function up(share) {
    var inside = Math.min(MOST, Math.max(LEAST, share));
    return TOP + (TALL - TOP - BOTTOM) * (MOST - inside) / (MOST - LEAST);
  }
  function path(points) {
    return "M" + points.map(function (p) { return p[0].toFixed(1) + "," + p[1].toFixed(1); }).join("L");
  }

  function plot(x, found) {
    var low = [], mid = [], high = [], parts = [];
    LINKS.forEach(function (gbit) {
      var there = Object.assign({}, x, { link_gbit: gbit }), ends = quantiles(sampled(there).map(saving), [0.1, 0.9]);
      low.push([across(gbit), up(ends[0])]); high.push([across(gbit), up(ends[1])]);
      mid.push([across(gbit), up(saving(step(there, there)))]);
    });
    parts.push('<rect class="tq-claimed" x="' + LEFT + '" y="' + up(0.56) + '" width="' + (WIDE - LEFT - RIGHT) +
      '" height="' + (up(0.27) - up(0.56)) + '"></rect>');
    parts.push('<text x="' + (WIDE - RIGHT - 4) + '" y="' + (up(0.56) + 14) +
      '" text-anchor="end">claimed: 27 to 56 %</text>');
    [-0.25, 0, 0.25, 0.5].forEach(function (share) {
      parts.push('<line class="' + (share ? "tq-grid" : "tq-zero") + '" x1="' + LEFT + '" x2="' + (WIDE - RIGHT) +
        '" y1="' + up(share) + '" y2="' + up(share) + '"></line><text x="' + (LEFT - 6) + '" y="' + (up(share) + 4) +
        '" text-anchor="end">' + (100 * share + " %").replace("-", "−") + "</text>");
    });
    [10, 25, 100, 400, 1600].forEach(function (gbit) {
      parts.push('<text x="' + across(gbit) + '" y="' + (TALL - BOTTOM + 18) + '" text-anchor="' +
        (gbit === 1600 ? "end" : "middle") + '">' + gbit + "</text>");
    });
    parts.push('<text x="' + (LEFT + WIDE - RIGHT) / 2 + '" y="' + (TALL - 4) +
      '" text-anchor="middle">network link per GPU, Gbit/s</text>');
    parts.push('<path class="tq-band" d="' + path(high.concat(low.slice().reverse())) + 'Z"></path>');
    parts.push('<path class="tq-line" d="' + path(mid) + '"></path>');
    var at = Math.min(1600, Math.max(5, x.link_gbit)), right = across(at) > WIDE / 2;
    parts.push('<circle class="tq-case" cx="' + across(at) + '" cy="' + up(found.saving) + '" r="5"></circle>');
    parts.push('<text class="tq-case" x="' + (across(at) + (right ? -9 : 9)) + '" y="' + (up(found.saving) - 14) +
      '" text-anchor="' + (right ? "end" : "start") + '">this case: ' + shown(found.saving, "percent") + "</text>");
    return '<svg viewBox="0 0 ' + WIDE + " " + TALL + '" role="img" aria-label="Saving against the network link: ' +
      shown(found.saving, "percent") + " at " + x.link_gbit + ' Gbit/s per GPU; line: at the expected inputs, band: 80 % ' +
      'of the draws">' + parts.join("") + "</svg>";
  }
  var forms = Array.prototype.slice.call(document.querySelectorAll("form.tq-calculator"));

  function number(text) { return text.trim() === "" ? NaN : Number(text); }

  function values(form) {
    var found = {};
    data.fields[form.dataset.name].forEach(function (field) {
      found[field.name] = number(form.elements[field.name].value);
    });
    return found;
  }

  /* A range grows to hold its value: who changes a value need not change the range. */
  function widen(form) {
    UNCERTAIN.forEach(function (name) {
      var input = form.elements[name];
      if (!input) return;
      var low = form.elements[name + "_low"], high = form.elements[name + "_high"], value = number(input.value);
      if (value < number(low.value)) low.value = value;
      if (value > number(high.value)) high.value = value;
    });
  }

  /* The preset that the fields stand for, if any. */
  function named(form) {
    var presets = data.presets[form.dataset.name] || {}, select = form.elements.preset;
    if (!select) return;
    select.value = Object.keys(presets).filter(function (label) {
      return Object.keys(presets[label]).every(function (key) {
        return number(form.elements[key].value) === presets[label][key];
      });
    })[0] || "";
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
    var figure = form.querySelector(".tq-plot");
    if (figure) figure.innerHTML = found ? plot(given, found) : "";
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
      widen(form);
      named(form);
      update(form);
    });
  }

  forms.forEach(function (form) {
    form.hidden = false;
    form.addEventListener("input", function (event) {
      var preset = event.target.name === "preset" && (data.presets[form.dataset.name] || {})[event.target.value];
      if (preset) Object.keys(preset).forEach(function (key) { form.elements[key].value = preset[key]; });
      if (event.target.name === "link") return;
      if (UNCERTAIN.indexOf(event.target.name) >= 0) widen(form);
      if (!preset) named(form);
      update(form);
      remember();
    });
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.addEventListener("reset", function () { setTimeout(function () { named(form); update(form); remember(); }, 0); });
    form.elements.link.addEventListener("focus", function () { form.elements.link.select(); });
  });
  window.addEventListener("hashchange", read);
  if (forms.length) read();
})();
