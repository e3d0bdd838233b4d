// `node client.js URL KEY CHROMIUM FOLDER`: the live page in a real browser, under load; screenshots and a sign to the test go into FOLDER.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [url, key, executablePath, folder] = process.argv.slice(2);
const HOSTILE = "<img src=x onerror=document.title=1>";
const FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const profile = mkdtempSync(join(tmpdir(), "dashboard-"));
// `headless` gives --headless, and the folder --user-data-dir.
const context = await chromium.launchPersistentContext(profile, { executablePath, headless: true, args: FLAGS, viewport: { width: 1440, height: 1000 } });
try {
  const page = context.pages()[0] ?? (await context.newPage());
  const complaints = [];
  page.on("pageerror", (error) => complaints.push(`${error}`));
  page.on("console", (message) => {
    // A refused key is an error to the browser, too.
    const isRefusal = message.text().includes("401") && message.location().url.endsWith("/dashboard/events");
    if (["error", "warning"].includes(message.type()) && !isRefusal) complaints.push(message.text());
  });
  const elsewhere = [];
  page.on("request", (request) => { if (!request.url().startsWith(url)) elsewhere.push(request.url()); });

  await page.goto(`${url}/dashboard`);
  await page.waitForSelector("#key-dialog[open]");
  assert.match(await page.textContent("#key-message"), /asks for an API key/);
  await page.fill("#key", "wrong");
  await page.press("#key", "Enter");
  await page.waitForFunction(() => /not known/.test(document.querySelector("#key-message").textContent));
  assert.equal(await page.evaluate(() => sessionStorage.length), 0);
  await page.fill("#key", key);
  await page.press("#key", "Enter");
  await page.waitForSelector('#status[data-state="ready"]');
  assert.equal(await page.isVisible("#key-dialog"), false);
  assert.deepEqual(await page.evaluate(() => [Object.values(sessionStorage), localStorage.length, document.cookie]), [[key], 0, ""]);

  // The chart moves, and so do the figures.
  const line = () => page.getAttribute("article.chart:first-child path.line.s0", "d");
  await page.waitForFunction(() => Number(document.querySelector(".tile b").textContent) > 0);
  const before = await line();
  await page.waitForFunction((path) => document.querySelector("article.chart:first-child path.line.s0").getAttribute("d") !== path, before);
  assert.match(await page.getAttribute("article.chart:first-child svg.plot", "aria-label"), /Throughput, tokens\/s: answers \d/);
  await page.waitForFunction(() => /\d ms|\d s/.test(document.querySelectorAll(".tile b")[1].textContent));

  // A map with more than one colour; a cell is described by its place.
  await page.waitForFunction(() => document.querySelectorAll("#pool-legend .swatch[class*='o']").length > 0);
  const colours = await page.evaluate(() => {
    const canvas = document.querySelector("#pool");
    const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return new Set(pixels).size;
  });
  assert.ok(colours > 3, `${colours} colours`);
  await page.focus("#pool");
  await page.keyboard.press("ArrowRight");
  await page.waitForFunction(() => /^Pages? 1\b/.test(document.querySelector("#pool-cell").textContent));

  // What a client calls its request is text.
  await page.waitForFunction((name) => [...document.querySelectorAll("#timeline .id")].some((element) => element.textContent === name), HOSTILE);

  // A conversation.
  await page.fill("#chat-input", "<b onmouseover=document.title=2>hello</b>");
  await page.fill("#chat-tokens", "12");
  await page.press("#chat-input", "Enter");
  await page.waitForFunction(() => document.querySelectorAll(".token").length === 12 && document.querySelector("#chat-send").textContent === "Send");
  assert.equal(await page.textContent(".message.user .text"), "<b onmouseover=document.title=2>hello</b>");
  await page.locator(".token").nth(4).hover();
  await page.waitForSelector("#tip:not([hidden])");
  const shares = (await page.locator("#tip td:last-child").allTextContents()).map(Number.parseFloat);
  assert.ok(shares.length === 5 || shares.length === 6, "five, and the chosen one if it is none of them");
  assert.ok(shares.every((share, i) => share >= 0 && share <= 100 && (!i || share <= shares[i - 1])), `${shares}`);
  assert.equal(await page.locator("#tip .chosen").count(), 1);
  await page.focus(".message.assistant .text");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.getAttribute(".token.current", "data-index"), "6", "two further than the pointer");
  await page.keyboard.press("Escape");
  assert.equal(await page.isVisible("#tip"), false);

  // A finger's, a tablet's and a desk's width, by day and by night, and nothing is wider than the screen.
  for (const [name, width, height, colorScheme] of [["phone", 390, 844, "dark"], ["tablet", 900, 1100, "light"], ["desk-dark", 1440, 1000, "dark"], ["desk", 1440, 1000, "light"]]) {
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme });
    await page.waitForTimeout(400);
    assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= width, `${name} is too wide`);
    await page.screenshot({ path: join(folder, `dashboard-${name}.png`), fullPage: width < 1000 });
  }

  assert.equal(await page.title(), "jaxpaged");
  assert.equal(await page.evaluate(() => document.images.length), 0);
  assert.deepEqual(elsewhere, []);
  assert.deepEqual(complaints, []);

  // The server begins to stop.
  writeFileSync(join(folder, "stop"), "");
  await page.waitForSelector('#status[data-state="lost"]');
  assert.match(await page.textContent("#status-text"), /stop/);
} finally {
  await context.close();
  rmSync(profile, { recursive: true, force: true });
}
console.log("passed");
