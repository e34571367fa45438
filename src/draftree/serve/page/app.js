/** The page: connects settings, composer, views and side panel. */

import { Announcer } from "./announcer.js";
import { Api, wordsFor } from "./api.js";
import { ChatView } from "./chat.js";
import { CompareView } from "./compare.js";
import { CompleteView } from "./complete.js";
import { verdict } from "./difference.js";
import { keptConversations, newConversation } from "./conversations.js";
import { byId, copyText } from "./dom.js";
import { setUpExamples } from "./examples.js";
import { Following } from "./following.js";
import { History } from "./history.js";
import { Inspector } from "./inspector.js";
import { LoadView } from "./load.js";
import { PATHS, Run, follow } from "./run.js";
import { Settings } from "./settings.js";
import { decodeState, encodeState } from "./state.js";
import { setUpTabs } from "./tabs.js";
import { setUpTheme } from "./theme.js";

const MODES = ["chat", "complete", "compare", "load"];

/** The page and its one running request. */
class App {
  /** @type {AbortController | null} */
  #running = null;
  /** End of the running request. */
  #finished = Promise.resolve();
  /** @type {import("./write.js").Request | null} */
  #last = null;
  #prompt = byId("prompt");

  constructor() {
    this.state = decodeState(location.hash);
    this.api = new Api(document.baseURI, Settings.key);
    this.announcer = new Announcer(byId("announcements"));
    /** @type {Map<string, number>} */
    this.plainSpeeds = new Map();
    this.inspector = new Inspector(() => this.plainSpeeds.get(this.state.model) ?? null, this.announcer);
    const context = {
      api: this.api,
      state: this.state,
      inspector: this.inspector,
      announcer: this.announcer,
      plainSpeeds: this.plainSpeeds,
      onWritten: (request) => (this.#last = request.run.isPlain ? this.#last : request),
    };
    this.views = {
      chat: new ChatView(context, (work) => this.#write(work)),
      complete: new CompleteView(context),
      compare: new CompareView(context),
    };
    this.history = new History(this.views.chat, {
      onOpen: (id) => this.#open(id),
      system: () => this.state.system,
    });
    this.load = new LoadView(this.api);
    this.following = new Following(() => this.views[this.state.mode]?.isEmpty === false);
    this.settings = new Settings(this.state, {
      onChange: () => {
        this.#save();
        this.#showEmpty();
      },
      onKey: () => this.connect(),
    });
    this.selectTab = setUpTabs([...document.querySelectorAll("[role=tab]")], (mode) => this.#enter(mode));
  }

  /** Shows the state and attaches listeners. */
  start() {
    setUpTheme();
    setUpExamples((prompt) => this.#suggest(prompt));
    this.#attach();
    this.#open(history.state?.conversation ?? null);
    this.#show();
    this.connect();
  }

  /** Reads the lists of models and drafters. */
  async connect() {
    const status = byId("connection");
    try {
      const missing = await this.settings.load(this.api);
      const count = this.settings.numModels;
      status.textContent = `● connected, ${count} ${count === 1 ? "model" : "models"}`;
      this.#showError(missing || null);
      this.#showEmpty();
    } catch (error) {
      status.textContent = "○ not connected";
      this.#showError(error);
    }
  }

  #attach() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("input", () => {
      this.state.prompt = this.#prompt.value;
      this.#save();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
    window.addEventListener("hashchange", () => this.#read());
    byId("stop-run").addEventListener("click", () => this.#running?.abort());
    byId("to-complete").addEventListener("click", () => this.#enter("complete"));
    byId("clear").addEventListener("click", () => this.#clear());
    byId("share").addEventListener("click", () => this.#share());
    byId("skip").addEventListener("click", () => this.#prompt.focus());
    byId("to-inspector").addEventListener("click", () => {
      byId("inspector").scrollIntoView({ block: "start" });
      byId("inspector").focus({ preventScroll: true });
    });
    byId("measure-plain").addEventListener("click", () => this.#guard((signal) => this.#measurePlain(signal)));
  }

  /** @param {string} mode */
  #enter(mode) {
    this.state.mode = mode;
    this.#save();
    this.#show();
  }

  #read() {
    if (location.hash.slice(1) === encodeState(this.state)) return;
    Object.assign(this.state, decodeState(location.hash));
    this.#show();
  }

  #save() {
    const fragment = encodeState(this.state);
    const place = { conversation: this.views.chat.conversation.id }; // is opened again after a reload
    history.replaceState(place, "", fragment ? `#${fragment}` : location.pathname + location.search);
  }

  #show() {
    const { mode } = this.state;
    this.selectTab(mode);
    this.settings.show();
    for (const name of MODES) byId(`view-${name}`).hidden = name !== mode;
    const isLoad = mode === "load";
    for (const id of ["settings", "inspector"]) byId(id).hidden = isLoad;
    byId("conversations-box").hidden = mode !== "chat";
    document.body.classList.toggle("load-mode", isLoad);
    byId("send").textContent = { complete: "Continue", compare: "Compare" }[mode] ?? "Send";
    if (this.#prompt.value !== this.state.prompt) this.#prompt.value = this.state.prompt;
    if (isLoad) this.load.open();
    else this.load.close();
    this.#showEmpty();
  }

  #showEmpty() {
    const view = this.views[this.state.mode];
    const hint = byId(`view-${this.state.mode}`).querySelector(".empty");
    const { supportsChat } = this.settings;
    const isRefused = this.state.mode === "chat" && !supportsChat;
    if (hint) hint.hidden = !view.isEmpty || isRefused;
    byId("no-template").hidden = !isRefused;
    byId("no-template").firstElementChild.textContent = `${this.state.model} is a base model without a chat template.`;
    byId("composer").hidden = !view || isRefused;
    this.following.update();
  }

  /** @param {string} prompt */
  #suggest(prompt) {
    this.#prompt.value = this.state.prompt = prompt;
    this.#save();
    this.#prompt.focus();
  }

  #send() {
    const prompt = this.#prompt.value;
    const { mode } = this.state;
    const view = this.views[mode];
    if (this.#running || !view) return;
    if (prompt.trim() === "") {
      this.#showError("Write a prompt first.");
      return;
    }
    this.#write(async (signal) => {
      const sent = view.send(prompt, signal);
      if (mode === "chat") this.#prompt.value = "";
      try {
        await sent;
      } catch (error) {
        if (this.#prompt.value === "") this.#prompt.value = prompt;
        throw error;
      }
    });
  }

  /** @param {(signal: AbortSignal) => Promise<void>} work a request whose text is followed */
  #write(work) {
    const problem = this.settings.problem();
    if (problem) {
      this.#showError(problem);
      return;
    }
    this.#guard(async (signal) => {
      const done = work(signal);
      this.#showEmpty();
      this.following.start();
      await done;
    });
  }

  /** @param {(signal: AbortSignal) => Promise<void>} work the one running request, or pair of requests */
  #guard(work) {
    if (!this.#running) this.#finished = this.#runAlone(work);
  }

  /** @param {(signal: AbortSignal) => Promise<void>} work */
  async #runAlone(work) {
    this.#running = new AbortController();
    this.#setBusy(true);
    this.#showError(null);
    try {
      await work(this.#running.signal);
    } catch (error) {
      this.#running.abort();
      this.#showError(error);
    } finally {
      this.#running = null;
      this.#setBusy(false);
      this.history.show();
      this.#save();
      this.#showEmpty();
      this.following.stop();
    }
  }

  /** @param {AbortSignal} signal repeats the last request without drafts, and compares the texts */
  async #measurePlain(signal) {
    const { kind, body, run: drafted } = this.#last;
    const run = new Run({ isPlain: true, seed: drafted.seed });
    const onPieces = () => (byId("ratio").textContent = `plain: ${run.tokens} tokens written`);
    await follow({ api: this.api, path: PATHS[kind], body: { ...body, draft: "none" }, run, signal, onPieces });
    if (run.status === "done" && run.speed) this.plainSpeeds.set(body.model, run.speed);
    this.inspector.update();
    const { title } = verdict(run.text, drafted.text, run.status === "done");
    byId("ratio").append(`. ${title}.`);
    this.announcer.say(byId("ratio").textContent);
  }

  /** @param {boolean} isBusy */
  #setBusy(isBusy) {
    const hadFocus = document.activeElement === byId(isBusy ? "send" : "stop-run");
    document.body.classList.toggle("busy", isBusy);
    byId("send").hidden = isBusy;
    byId("stop-run").hidden = !isBusy;
    if (hadFocus) byId(isBusy ? "stop-run" : "send").focus();
  }

  async #clear() {
    const { mode } = this.state;
    const question = mode === "chat" ? "Delete this conversation?" : "Remove the texts of this view?";
    if (!this.views[mode].isEmpty && !window.confirm(question)) return;
    await this.#stop();
    this.views[mode].clear();
    this.#showOther();
  }

  /** @param {string | null} id of a kept conversation; a new one if there is none */
  async #open(id) {
    await this.#stop();
    this.views.chat.open(keptConversations().find((one) => one.id === id) ?? newConversation());
    this.#showOther();
  }

  /** Ends the running request, whose text stays. */
  #stop() {
    this.#running?.abort();
    return this.#finished;
  }

  /** Shows that other texts are in view. */
  #showOther() {
    this.inspector.clear();
    this.history.show();
    this.#save();
    this.#showEmpty();
  }

  async #share() {
    this.#save();
    const isCopied = await copyText(location.href);
    byId("share").textContent = isCopied ? "Link copied" : "Copy the address";
    setTimeout(() => (byId("share").textContent = "Copy link"), 2000);
  }

  /** @param {unknown} error null removes the message */
  #showError(error) {
    const box = byId("error");
    box.hidden = error === null;
    if (error !== null) box.textContent = typeof error === "string" ? error : wordsFor(error);
  }
}

new App().start();
