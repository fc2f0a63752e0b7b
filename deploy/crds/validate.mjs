// Validates custom resources, given as a JSON list on stdin, against the models of the packages in package.json: values
// by their schemas, and names of fields by their types (schemas of custom resources let unknown fields pass, and a
// cluster would drop them without a word).
//
// Prints a line for each: "ok KIND", "unknown KIND" or "bad KIND: why". Exits with 1 if any is bad.
import { readFileSync, writeFileSync, unlinkSync } from "node:fs";
import { spawnSync } from "node:child_process";

const MODELS = {
  GCPBackendPolicy: "@kubernetes-models/gke/networking.gke.io/v1/GCPBackendPolicy",
  HealthCheckPolicy: "@kubernetes-models/gke/networking.gke.io/v1/HealthCheckPolicy",
  Gateway: "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/Gateway",
  HTTPRoute: "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute",
  ServiceMonitor: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
};

async function problem(document) {
  const module = await import(MODELS[document.kind]);
  try {
    new module[document.kind](document).validate();
  } catch (error) {
    return error.message;
  }
  return unknownFields(document);
}

function unknownFields(document) {
  const { apiVersion, kind, ...content } = document;
  const file = `check-${kind}.ts`;
  writeFileSync(file, `import { ${kind} } from "${MODELS[kind]}";\nnew ${kind}(${JSON.stringify(content)});\n`);
  const options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"];
  const done = spawnSync("node_modules/.bin/tsc", [...options, file], { encoding: "utf8" });
  unlinkSync(file);
  return done.status === 0 ? null : done.stdout.trim() || String(done.error);
}

let bad = 0;
for (const document of JSON.parse(readFileSync(0, "utf8"))) {
  const found = MODELS[document.kind] ? await problem(document) : "unknown";
  if (found && found !== "unknown") bad = 1;
  console.log(found === null ? `ok ${document.kind}` : found === "unknown" ? `unknown ${document.kind}` : `bad ${document.kind}: ${found}`);
}
process.exit(bad);
