// Greedy tokens of a GGUF file by llama.cpp: node llama.mjs MODEL TOKENS THREADS ROUNDS PROMPT
// Prints, as JSON, the seconds of each token after the first of each round, and the last round's tokens.
import {getLlama} from "node-llama-cpp";

const [modelPath, tokens, threads, rounds, prompt] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, maxThreads: Number(threads), logLevel: "error"});
const model = await llama.loadModel({modelPath});
const seconds = [];
let found = [];
for (let round = 0; round < Number(rounds); round++) {
    const context = await model.createContext({contextSize: 1024, threads: Number(threads)});
    const sequence = context.getSequence();
    found = [];
    let last;
    for await (const token of sequence.evaluate(model.tokenize(prompt), {temperature: 0})) {
        const now = performance.now();
        if (last !== undefined)
            seconds.push((now - last) / 1000);
        last = now;
        found.push(token);
        if (found.length > Number(tokens))
            break;
    }
    await context.dispose();
}
console.log(JSON.stringify({seconds, tokens: found}));
process.exit(0);
