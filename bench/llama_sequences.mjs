// Answers of llama.cpp by node-llama-cpp, whose context batches the sequences. A line of standard input asks
// for a number of requests, prompt tokens and answer tokens; a line of JSON tells tokens, milliseconds, and those of the processor.
import {createInterface} from "node:readline";
import {getLlama} from "node-llama-cpp";

const [file, [most, length, threads]] = [process.argv[2], process.argv.slice(3).map(Number)];
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, progressLogs: false});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({sequences: most, contextSize: length, batchSize: 512, threads});
const sequences = Array.from({length: most}, () => context.getSequence());

async function answer(sequence, prompt, count) {
  const ids = Array.from({length: prompt}, () => 100 + Math.floor(Math.random() * 40000));
  let tokens = 0;
  for await (const _ of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) if (++tokens >= count) break;
  await sequence.clearHistory();
  return tokens;
}

console.log(JSON.stringify({ready: true}));
for await (const line of createInterface({input: process.stdin})) {
  const [requests, prompt, count] = line.split(" ").map(Number);
  const [begun, used] = [performance.now(), process.cpuUsage()];
  const got = await Promise.all(sequences.slice(0, requests).map((own) => answer(own, prompt, count)));
  const {user, system} = process.cpuUsage(used);
  const tokens = got.reduce((sum, own) => sum + own, 0);
  console.log(JSON.stringify({tokens, wall: performance.now() - begun, processor: (user + system) / 1000}));
}
process.exit(0);
