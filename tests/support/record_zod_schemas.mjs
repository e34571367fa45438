// Writes the JSON schemas of the types that zod documents: npm install zod@4 && node record_zod_schemas.mjs > zod_schemas.json
import * as z from "zod";
import { createRequire } from "node:module";

const Node = z.object({ value: z.number(), get children() { return z.array(Node); } });
const User = z.object({ name: z.string(), age: z.number().int().optional() });
const types = {
  string: z.string(), number: z.number(), boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(),
  int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(),
  literal: z.literal("tuna"), literals: z.literal(["red", 3, true, null]), enum: z.enum(["Salmon", "Tuna"]),
  nativeEnum: z.enum({ Up: "UP", Down: 2 }), never: z.object({ a: z.string(), b: z.never().optional() }),
  max: z.string().max(5), min: z.string().min(5), length: z.string().length(5), minMax: z.string().min(2).max(20),
  regex: z.string().regex(/^[a-z]+$/), startsWith: z.string().startsWith("aaa"), endsWith: z.string().endsWith("zzz"),
  includes: z.string().includes("---"), uppercase: z.string().uppercase(), lowercase: z.string().lowercase(),
  several: z.string().startsWith("a").endsWith("z").max(12), trim: z.string().trim().toLowerCase(),
  email: z.email(), emailHtml5: z.email({ pattern: z.regexes.html5Email }),
  emailRfc5322: z.email({ pattern: z.regexes.rfc5322Email }), emailUnicode: z.email({ pattern: z.regexes.unicodeEmail }),
  emailLength: z.email().max(40),
  uuid: z.uuid(), uuidv4: z.uuidv4(), uuidv7: z.uuidv7(), guid: z.guid(), url: z.url(), httpUrl: z.httpUrl(),
  hostname: z.hostname(), emoji: z.emoji(), base64: z.base64(), base64url: z.base64url(), hex: z.hex(), jwt: z.jwt(),
  nanoid: z.nanoid(), cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(),
  ipv4: z.ipv4(), ipv6: z.ipv6(), mac: z.mac(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), hash: z.hash("sha256"),
  isoDate: z.iso.date(), isoTime: z.iso.time(), isoTimePrecision: z.iso.time({ precision: 3 }),
  isoDatetime: z.iso.datetime(), isoDatetimeOffset: z.iso.datetime({ offset: true }),
  isoDatetimeLocal: z.iso.datetime({ local: true }), isoDuration: z.iso.duration(), e164: z.e164(),
  templateLiteral: z.templateLiteral([z.number(), z.enum(["px", "em", "%"])]),
  templateString: z.templateLiteral(["hello, ", z.string(), "!"]),
  gt: z.number().gt(5), gte: z.number().gte(5), lt: z.number().lt(5), lte: z.number().lte(5),
  positive: z.number().positive(), nonnegative: z.number().nonnegative(), negative: z.number().negative(),
  nonpositive: z.number().nonpositive(), multipleOf: z.number().multipleOf(5), step: z.number().multipleOf(0.01).min(0),
  intRange: z.int().min(1).max(10), stepRange: z.int().multipleOf(3).min(2).max(50),
  optional: z.object({ a: z.string().optional() }), nullable: z.string().nullable(),
  nullish: z.object({ a: z.int().nullish() }), default: z.object({ a: z.string().default("x") }),
  prefault: z.object({ a: z.string().prefault("x") }), catch: z.object({ a: z.number().catch(42) }),
  object: User, strictObject: z.strictObject({ a: z.string() }), looseObject: z.looseObject({ a: z.string() }),
  catchall: z.object({ a: z.string() }).catchall(z.string()), extend: User.extend({ tag: z.string() }),
  partial: User.partial(), required: User.required(), keyof: User.keyof(), recursive: Node,
  array: z.array(z.string()), arrayMin: z.array(z.int()).min(1), arrayMax: z.array(z.int()).max(5),
  arrayLength: z.array(z.int()).length(3), tuple: z.tuple([z.string(), z.number()]),
  tupleRest: z.tuple([z.string()], z.number()), tupleOptional: z.tuple([z.string(), z.int().optional()]),
  union: z.union([z.string(), z.number()]), xor: z.xor([z.string(), z.number()]),
  discriminatedUnion: z.discriminatedUnion("status", [
    z.object({ status: z.literal("success"), data: z.string() }),
    z.object({ status: z.literal("failed"), error: z.string() }),
  ]),
  intersection: z.intersection(z.object({ name: z.string() }), z.object({ role: z.string() })),
  intersectionLoose: z.intersection(z.looseObject({ name: z.string() }), z.looseObject({ role: z.string() })),
  record: z.record(z.string(), z.number()), recordEnum: z.record(z.enum(["id", "name"]), z.string()),
  partialRecord: z.partialRecord(z.enum(["id", "name"]), z.string()),
  looseRecord: z.looseRecord(z.string().regex(/_phone$/), z.string()), recordNumber: z.record(z.number(), z.string()),
  json: z.json(), readonly: z.object({ a: z.string() }).readonly(), brand: z.string().brand("Cat"),
  stringbool: z.stringbool(), coerce: z.coerce.number(), pipe: z.string().pipe(z.string().min(2)), lazy: z.lazy(() => User),
  described: z.object({ a: z.string().describe("text").meta({ title: "A", order: 1, markdownDescription: "*a*" }) }),
  refined: z.string().refine((text) => text.length > 3), file: z.file(), set: z.set(z.string()), map: z.map(z.string(), z.int()),
  date: z.date(), bigint: z.bigint(), unrepresentable: z.object({ a: z.string(), b: z.custom() }),
};
const found = {};
for (const [name, type] of Object.entries(types)) {
  for (const target of ["draft-2020-12", "draft-07", "draft-04", "openapi-3.0"]) {
    for (const io of ["output", "input"]) {
      const { $schema, ...schema } = z.toJSONSchema(type, { target, io, unrepresentable: "any" });
      const text = JSON.stringify(schema);
      if (!Object.values(found).some((other) => JSON.stringify(other) === text)) found[`${name} ${target} ${io}`] = schema;
    }
  }
}
const version = createRequire(import.meta.url)("zod/package.json").version;
const rows = Object.entries(found).map(([name, schema]) => `${JSON.stringify(name)}: ${JSON.stringify(schema)}`);
console.log(`{"zod": ${JSON.stringify(version)}, "schemas": {\n${rows.join(",\n")}\n}}`);
