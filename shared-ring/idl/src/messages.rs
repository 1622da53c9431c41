//! Messages, their encoders, the decoder and the dispatch.

use std::fmt::Write as _;

use crate::table::{Body, Enum, Field, FieldType, Kind, Message, Scalar, Struct, Table, Tail};

/// A hash of all that the two ends of a ring must agree on: ids, names, fields, types, bounds, values, in the
/// words of the language (so that it depends on the table alone).
#[must_use]
pub fn protocol_hash(table: &Table, next: bool) -> u64 {
    let mut canonical = String::new();
    for message in table.protocol(next) {
        let _ = writeln!(
            canonical,
            "message {} {} {}",
            message.id,
            message.name,
            message.kind.words()
        );
        for body in [&message.body, &message.reply] {
            for field in &body.fields {
                let nonzero = if field.nonzero { " nonzero" } else { "" };
                let _ = writeln!(canonical, "{} {}{nonzero}", field.name, field.kind);
            }
            for tail in &body.tails {
                let element = tail.element.as_deref().unwrap_or("bytes");
                let _ = writeln!(canonical, "tail {} {element} max {}", tail.name, tail.max);
            }
            canonical.push_str("reply\n");
        }
    }
    for item in &table.enums {
        for (value, name) in &item.values {
            let _ = writeln!(canonical, "enum {} {value} {name}", item.name);
        }
    }
    for item in &table.structs {
        for field in &item.fields {
            let _ = writeln!(
                canonical,
                "struct {} {} {}",
                item.name, field.name, field.kind
            );
        }
    }
    fnv1a(canonical.as_bytes())
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The module of messages for `wormhole-api`.
#[must_use]
pub fn messages(table: &Table, next: bool) -> String {
    let mut out = String::new();
    let messages: Vec<&Message> = table.protocol(next).collect();
    let _ = writeln!(
        out,
        "/// What both ends of a ring must agree on, as one number."
    );
    let _ = writeln!(
        out,
        "pub const PROTOCOL_HASH: u64 = {:#018x};\n",
        protocol_hash(table, next)
    );
    for item in &table.enums {
        enumeration(&mut out, item);
    }
    for item in &table.structs {
        structure(&mut out, item);
    }
    for message in &messages {
        whole_message(&mut out, message);
    }
    requests(&mut out, &messages);
    dispatch(&mut out, &messages);
    out
}

fn docs(out: &mut String, indent: &str, doc: &[String]) {
    for line in doc {
        let _ = writeln!(out, "{indent}/// {line}");
    }
}

fn enumeration(out: &mut String, item: &Enum) {
    docs(out, "", &item.doc);
    let _ = writeln!(
        out,
        "#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]\npub enum {} {{",
        item.name
    );
    for (_, name) in &item.values {
        let _ = writeln!(out, "    {name},");
    }
    let _ = writeln!(out, "}}\n\nimpl {} {{", item.name);
    let _ = writeln!(
        out,
        "    /// Every value.\n    pub const ALL: &'static [Self] = &["
    );
    for (_, name) in &item.values {
        let _ = writeln!(out, "        Self::{name},");
    }
    let _ = writeln!(
        out,
        "    ];\n\n    /// The value on the wire.\n    #[must_use]"
    );
    let _ = writeln!(
        out,
        "    pub const fn to_wire(self) -> u32 {{\n        match self {{"
    );
    for (value, name) in &item.values {
        let _ = writeln!(out, "            Self::{name} => {value},");
    }
    let _ = writeln!(
        out,
        "        }}\n    }}\n\n    /// What a value on the wire means.\n    #[must_use]"
    );
    let _ = writeln!(
        out,
        "    pub const fn from_wire(value: u32) -> Option<Self> {{\n        match value {{"
    );
    for (value, name) in &item.values {
        let _ = writeln!(out, "            {value} => Some(Self::{name}),");
    }
    let _ = writeln!(out, "            _ => None,\n        }}\n    }}\n}}\n");
}

const WIRE_DERIVES: &str = "#[derive(Clone, Copy, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout";

fn structure(out: &mut String, item: &Struct) {
    docs(out, "", &item.doc);
    let align = item.align.map(|bytes| format!(", align({bytes})"));
    let _ = writeln!(
        out,
        "#[repr(C{})]\n{WIRE_DERIVES}, Debug, PartialEq)]\npub struct {} {{",
        align.unwrap_or_default(),
        item.name
    );
    for field in &item.fields {
        docs(out, "    ", &field.doc);
        let _ = writeln!(out, "    pub {}: {},", field.name, wire_type(&field.kind));
    }
    let _ = writeln!(out, "}}\n");
}

fn whole_message(out: &mut String, message: &Message) {
    body(
        out,
        &message.name,
        &message.name,
        &message.doc,
        &message.body,
        "MESSAGE_LIMIT",
    );
    let has_reply = !is_empty(&message.reply);
    if has_reply {
        let name = format!("{}Reply", message.name);
        let doc = [format!("The answer to [`{}`].", message.name)];
        body(
            out,
            &name,
            &message.name,
            &doc,
            &message.reply,
            "REPLY_LIMIT",
        );
    }
    let kind = match message.kind {
        Kind::Record => "Record",
        Kind::Request => "Request",
        Kind::Blocking => "Blocking",
    };
    let reply = match (has_reply, borrows(&message.reply)) {
        (false, _) => "()".to_owned(),
        (true, false) => format!("{}Reply", message.name),
        (true, true) => format!("{}Reply<'r>", message.name),
    };
    let _ = writeln!(
        out,
        "impl Message for {name}{any} {{\n    const ID: u16 = {id};\n    const NAME: &'static str = \"{name}\";\n    const KIND: Kind = Kind::{kind};\n    type Reply<'r> = {reply};\n}}\n",
        name = message.name,
        any = if borrows(&message.body) { "<'_>" } else { "" },
        id = message.id,
    );
}

fn is_empty(body: &Body) -> bool {
    body.fields.is_empty() && body.tails.is_empty()
}

fn borrows(body: &Body) -> bool {
    !body.tails.is_empty()
}

fn wire_type(kind: &FieldType) -> String {
    match kind {
        FieldType::Scalar(scalar) => scalar.name().to_owned(),
        FieldType::Array(scalar, count) => format!("[{}; {count}]", scalar.name()),
        FieldType::Address
        | FieldType::Handle(_)
        | FieldType::Minted(_)
        | FieldType::OptionalHandle(_) => "u64".to_owned(),
        FieldType::Fence | FieldType::OptionalFence | FieldType::Enum(_) => "u32".to_owned(),
    }
}

fn rust_type(kind: &FieldType) -> String {
    match kind {
        FieldType::Scalar(_) | FieldType::Array(..) => wire_type(kind),
        FieldType::Address => "DevicePtr".to_owned(),
        FieldType::Handle(handle) | FieldType::Minted(handle) => {
            format!("Handle<{}>", handle.name())
        }
        FieldType::OptionalHandle(handle) => format!("Option<Handle<{}>>", handle.name()),
        FieldType::Fence => "Fence".to_owned(),
        FieldType::OptionalFence => "Option<Fence>".to_owned(),
        FieldType::Enum(name) => name.clone(),
    }
}

fn tail_type(tail: &Tail) -> String {
    tail.element.as_ref().map_or_else(
        || "&'a [u8]".to_owned(),
        |element| format!("Items<'a, {element}>"),
    )
}

/// One side of a message: the struct with typed fields, its layout on the wire, and the way between them.
fn body(out: &mut String, name: &str, message: &str, doc: &[String], body: &Body, limit: &str) {
    let lifetime = if borrows(body) { "<'a>" } else { "" };
    if doc.is_empty() {
        let _ = writeln!(out, "/// See the message in `messages/`.");
    }
    docs(out, "", doc);
    let _ = writeln!(
        out,
        "#[derive(Clone, Copy, Debug, PartialEq)]\npub struct {name}{lifetime} {{"
    );
    for field in &body.fields {
        docs(out, "    ", &field.doc);
        let _ = writeln!(out, "    pub {}: {},", field.name, rust_type(&field.kind));
    }
    for tail in &body.tails {
        docs(out, "    ", &tail.doc);
        let _ = writeln!(out, "    pub {}: {},", tail.name, tail_type(tail));
    }
    let _ = writeln!(out, "}}\n");
    wire_struct(out, name, body);
    encoder(out, name, message, body, limit);
    decoder(out, name, message, body);
}

/// The padding before each field of the fixed part and behind the last, then its size.
fn padding(body: &Body) -> (Vec<usize>, usize) {
    let mut offset = 0_usize;
    let mut greatest = 1;
    let mut pads = Vec::new();
    let layouts = body.fields.iter().map(|field| field.kind.layout());
    for (size, align) in layouts.chain(body.tails.iter().map(|_| (4, 4))) {
        let aligned = offset.next_multiple_of(align);
        pads.push(aligned - offset);
        offset = aligned + size;
        greatest = greatest.max(align);
    }
    let size = offset.next_multiple_of(greatest);
    pads.push(size - offset);
    (pads, size)
}

fn wire_struct(out: &mut String, name: &str, body: &Body) {
    if is_empty(body) {
        return;
    }
    let (pads, _) = padding(body);
    let _ = writeln!(out, "#[repr(C)]\n{WIRE_DERIVES})]\nstruct {name}Wire {{");
    let mut pads = pads.into_iter().enumerate();
    let mut pad = |out: &mut String| {
        if let Some((index, bytes)) = pads.next().filter(|(_, bytes)| *bytes != 0) {
            let _ = writeln!(out, "    pad{index}: [u8; {bytes}],");
        }
    };
    for field in &body.fields {
        pad(out);
        let _ = writeln!(out, "    {}: {},", field.name, wire_type(&field.kind));
    }
    for tail in &body.tails {
        pad(out);
        let _ = writeln!(out, "    {}_count: u32,", tail.name);
    }
    pad(out);
    let _ = writeln!(out, "}}\n");
}

fn encoder(out: &mut String, name: &str, message: &str, body: &Body, limit: &str) {
    let any = if borrows(body) { "<'_>" } else { "" };
    let _ = writeln!(
        out,
        "impl Encode for {name}{any} {{\n    #[inline]\n    fn encode<R>(&self, send: impl FnOnce(&[&[u8]]) -> R) -> Result<R, EncodeError> {{"
    );
    if is_empty(body) {
        let _ = writeln!(out, "        Ok(send(&[]))\n    }}\n}}\n");
        return;
    }
    let (pads, fixed) = padding(body);
    if borrows(body) {
        let _ = writeln!(out, "        let mut total = {fixed};");
    }
    for tail in &body.tails {
        let _ = writeln!(
            out,
            "        let {0}_count = wire::count(\"{message}\", \"{0}\", self.{0}.len(), {1})?;",
            tail.name, tail.max
        );
        let bytes = if tail.element.is_some() {
            ".as_bytes()"
        } else {
            ""
        };
        let _ = writeln!(out, "        total += self.{}{bytes}.len();", tail.name);
    }
    if borrows(body) {
        let _ = writeln!(
            out,
            "        wire::total(\"{message}\", total, wire::{limit})?;"
        );
    }
    let _ = writeln!(out, "        let fixed = {name}Wire {{");
    for (index, bytes) in pads.iter().enumerate().filter(|(_, bytes)| **bytes != 0) {
        let _ = writeln!(out, "            pad{index}: [0; {bytes}],");
    }
    for field in &body.fields {
        let _ = writeln!(out, "            {}: {},", field.name, to_wire(field));
    }
    for tail in &body.tails {
        let _ = writeln!(out, "            {}_count,", tail.name);
    }
    let _ = write!(out, "        }};\n        Ok(send(&[fixed.as_bytes()");
    for tail in &body.tails {
        let bytes = if tail.element.is_some() {
            ".as_bytes()"
        } else {
            ""
        };
        let _ = write!(out, ", self.{}{bytes}", tail.name);
    }
    let _ = writeln!(out, "]))\n    }}\n}}\n");
}

fn to_wire(field: &Field) -> String {
    let name = &field.name;
    match &field.kind {
        FieldType::Scalar(_) | FieldType::Array(..) => format!("self.{name}"),
        FieldType::Address => format!("self.{name}.0"),
        FieldType::Handle(_) | FieldType::Minted(_) | FieldType::Fence | FieldType::Enum(_) => {
            format!("self.{name}.to_wire()")
        }
        FieldType::OptionalHandle(_) => format!("self.{name}.map_or(0, Handle::to_wire)"),
        FieldType::OptionalFence => format!("self.{name}.map_or(u32::MAX, Fence::to_wire)"),
    }
}

fn decoder(out: &mut String, name: &str, message: &str, body: &Body) {
    let lifetime = if borrows(body) { "<'a>" } else { "" };
    let _ = writeln!(
        out,
        "impl<'a> Decode<'a> for {name}{lifetime} {{\n    #[inline]\n    fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {{\n        const NAME: &str = \"{message}\";"
    );
    if is_empty(body) {
        let _ = writeln!(
            out,
            "        wire::end(NAME, body)?;\n        Ok(Self {{}})\n    }}\n}}\n"
        );
        return;
    }
    let mutable = if borrows(body) { "mut " } else { "" };
    let _ = writeln!(
        out,
        "        let (fixed, {mutable}rest) = wire::fixed::<{name}Wire>(NAME, body)?;"
    );
    for tail in &body.tails {
        let function = if tail.element.is_some() {
            "items"
        } else {
            "bytes"
        };
        let _ = writeln!(
            out,
            "        let {0} = wire::{function}(NAME, \"{0}\", fixed.{0}_count, {1}, &mut rest)?;",
            tail.name, tail.max
        );
    }
    let _ = writeln!(out, "        wire::end(NAME, rest)?;");
    for field in body.fields.iter().filter(|field| field.nonzero) {
        let name = &field.name;
        let slice = match field.kind {
            FieldType::Array(Scalar::U32, _) => format!("&fixed.{name}"),
            _ => format!("&[fixed.{name}]"),
        };
        let _ = writeln!(out, "        wire::nonzero(NAME, \"{name}\", {slice})?;");
    }
    let _ = writeln!(out, "        Ok(Self {{");
    for field in &body.fields {
        let _ = writeln!(out, "            {}: {},", field.name, from_wire(field));
    }
    for tail in &body.tails {
        let _ = writeln!(out, "            {},", tail.name);
    }
    let _ = writeln!(out, "        }})\n    }}\n}}\n");
}

fn from_wire(field: &Field) -> String {
    let name = &field.name;
    match &field.kind {
        FieldType::Scalar(_) | FieldType::Array(..) => format!("fixed.{name}"),
        FieldType::Address => format!("DevicePtr(fixed.{name})"),
        FieldType::Handle(_) => format!("wire::handle(NAME, \"{name}\", fixed.{name})?"),
        FieldType::Minted(_) => format!("wire::minted(NAME, \"{name}\", fixed.{name})?"),
        FieldType::OptionalHandle(_) => {
            format!("wire::optional_handle(NAME, \"{name}\", fixed.{name})?")
        }
        FieldType::Fence => format!("wire::fence(NAME, \"{name}\", fixed.{name})?"),
        FieldType::OptionalFence => {
            format!("wire::optional_fence(NAME, \"{name}\", fixed.{name})?")
        }
        FieldType::Enum(kind) => format!(
            "{kind}::from_wire(fixed.{name}).ok_or_else(|| wire::value(NAME, \"{name}\", u64::from(fixed.{name})))?"
        ),
    }
}

fn requests(out: &mut String, messages: &[&Message]) {
    let _ = writeln!(
        out,
        "/// Every message: id, name, kind, in the order of the ids.\npub const MESSAGES: &[MessageInfo] = &["
    );
    let mut sorted = messages.to_vec();
    sorted.sort_by_key(|message| message.id);
    for message in sorted {
        let _ = writeln!(
            out,
            "    MessageInfo {{ id: {0}::ID, name: {0}::NAME, kind: {0}::KIND }},",
            message.name
        );
    }
    let _ = writeln!(
        out,
        "];\n\n/// A message that has been checked.\n#[derive(Clone, Copy, Debug, PartialEq)]\npub enum Request<'a> {{"
    );
    for message in messages {
        let lifetime = if borrows(&message.body) { "<'a>" } else { "" };
        let _ = writeln!(out, "    {0}({0}{lifetime}),", message.name);
    }
    let _ = writeln!(
        out,
        "}}\n\nimpl Request<'_> {{\n    /// Which message it is.\n    #[must_use]\n    pub const fn info(&self) -> MessageInfo {{\n        match self {{"
    );
    for message in messages {
        let _ = writeln!(
            out,
            "            Self::{0}(_) => MessageInfo {{ id: {0}::ID, name: {0}::NAME, kind: {0}::KIND }},",
            message.name
        );
    }
    let _ = writeln!(
        out,
        "        }}\n    }}\n}}\n\n/// Reads and checks a record's body. Total: every input is a message or an error.\n///\n/// # Errors\n/// What is wrong with it, with the message's and the field's name.\npub fn decode(message: u16, body: &[u8]) -> Result<Request<'_>, DecodeError> {{\n    match message {{"
    );
    for message in messages {
        let _ = writeln!(
            out,
            "        {0}::ID => Ok(Request::{0}({0}::decode(body)?)),",
            message.name
        );
    }
    let _ = writeln!(
        out,
        "        _ => Err(DecodeError::UnknownMessage {{ id: message }}),\n    }}\n}}\n"
    );
}

/// The name of a test for a message.
pub(crate) fn snake_case(name: &str) -> String {
    let mut out = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

/// The dispatch to a server of every message, and what serves the messages whose answer is constant.
fn dispatch(out: &mut String, messages: &[&Message]) {
    for message in messages {
        let constants: Option<Vec<String>> = message
            .reply
            .fields
            .iter()
            .map(|field| Some(format!("{}: {}", field.name, field.constant.as_ref()?)))
            .collect();
        if let Some(fields) = constants.filter(|fields| !fields.is_empty()) {
            let _ = writeln!(
                out,
                "impl<S: Server> Serve<{0}> for S {{\n    fn serve(&mut self, _: &Self::Call, _: &{0}) -> wire::Outcome<{0}Reply> {{\n        Ok(wire::Served::Done({0}Reply {{ {1} }}))\n    }}\n}}\n",
                message.name,
                fields.join(", ")
            );
        }
    }
    let _ = writeln!(
        out,
        "/// Executes a message and hands its answer to `answer`, unless the server has put it off.\npub fn dispatch<S>(\n    server: &mut S,\n    call: &S::Call,\n    request: &Request<'_>,\n    mut answer: impl FnMut(CuResult, &[&[u8]]),\n) -> Dispatched\nwhere\n    S: Server,"
    );
    for message in messages {
        let _ = if borrows(&message.body) {
            writeln!(out, "    S: for<'m> Serve<{}<'m>>,", message.name)
        } else {
            writeln!(out, "    S: Serve<{}>,", message.name)
        };
    }
    let _ = writeln!(out, "{{\n    match request {{");
    for message in messages {
        let _ = writeln!(
            out,
            "        Request::{}(message) => deliver(server.serve(call, message), &mut answer),",
            message.name,
        );
    }
    let _ = writeln!(out, "    }}\n}}");
}
