// Browsers start no workers from files. There, the search's worker runs in a hidden frame of the page.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = inner.document.createElement("script");
      script.src = new URL(address, location.href);
      this.loaded = new Promise((done) => (script.onload = done));
      script.onerror = (event) => this.onerror?.(event);
      inner.document.body.append(script);
    }
    async postMessage(data) {
      await this.loaded;
      const inner = this.frame.contentWindow;
      inner?.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
