//! Property tests of the generated messages: what is encoded is decoded again.

use std::fmt::Write as _;

use crate::messages::snake_case;
use crate::table::{Body, Field, FieldType, Message, Scalar, Table};

/// One property for each message and each reply. The code that includes it provides `message(id, &m)` and
/// `reply(&r)`, which encode, decode and compare, and `handle()`, a strategy of minted handles.
#[must_use]
pub fn round_trips(table: &Table, next: bool) -> String {
    let mut out = String::new();
    for item in &table.structs {
        let names: Vec<&str> = item
            .fields
            .iter()
            .map(|field| field.name.as_str())
            .collect();
        let strategies: Vec<String> = item.fields.iter().map(strategy).collect();
        let _ = writeln!(
            out,
            "fn {0}() -> impl Strategy<Value = {1}> {{\n    ({2},).prop_map(|({3},)| {1} {{ {3} }})\n}}\n",
            snake_case(&item.name),
            item.name,
            strategies.join(", "),
            names.join(", ")
        );
    }
    out.push_str("proptest! {\n");
    for item in table.protocol(next) {
        let name = snake_case(&item.name);
        property(&mut out, &name, &item.name, &item.body, item, "message");
        if !item.reply.fields.is_empty() || !item.reply.tails.is_empty() {
            let struct_name = format!("{}Reply", item.name);
            property(
                &mut out,
                &format!("{name}_reply"),
                &struct_name,
                &item.reply,
                item,
                "reply",
            );
        }
    }
    out.push_str("}\n");
    out
}

fn property(out: &mut String, test: &str, name: &str, body: &Body, message: &Message, check: &str) {
    let mut arguments: Vec<String> = body
        .fields
        .iter()
        .map(|field| format!("{} in {}", field.name, strategy(field)))
        .collect();
    for tail in &body.tails {
        let element = tail.element.as_ref().map_or_else(
            || "any::<u8>()".to_owned(),
            |name| format!("{}()", snake_case(name)),
        );
        // Long tails are as good as short ones, and slow.
        let max = tail.max.min(300);
        arguments.push(format!(
            "{} in prop::collection::vec({element}, 0..={max})",
            tail.name
        ));
    }
    if arguments.is_empty() {
        arguments.push("_nothing in Just(())".to_owned());
    }
    let mut fields: Vec<String> = body.fields.iter().map(|field| field.name.clone()).collect();
    for tail in &body.tails {
        fields.push(match tail.element {
            Some(_) => format!("{0}: Items::new(&{0})", tail.name),
            None => format!("{0}: &{0}", tail.name),
        });
    }
    let value = format!("{name} {{ {} }}", fields.join(", "));
    let call = if check == "reply" {
        format!("let mut body = Vec::new();\n        reply(&{value}, &mut body)?;")
    } else {
        format!(
            "message({0}::ID, &{value}, Request::{0}({value}))?;",
            message.name
        )
    };
    let _ = writeln!(
        out,
        "    #[test]\n    fn {test}({}) {{\n        {call}\n    }}\n",
        arguments.join(", ")
    );
}

fn strategy(field: &Field) -> String {
    match &field.kind {
        FieldType::Scalar(scalar) => scalar_strategy(*scalar, field.nonzero),
        FieldType::Array(scalar, count) => format!(
            "prop::collection::vec({}, {count}).prop_map(|values| <[{}; {count}]>::try_from(values).expect(\"the length asked for\"))",
            scalar_strategy(*scalar, field.nonzero),
            scalar.name()
        ),
        FieldType::Address => "any::<u64>().prop_map(DevicePtr)".to_owned(),
        FieldType::Handle(crate::table::Handle::Stream) => {
            "prop_oneof![Just(Handle::<Stream>::LEGACY), handle()]".to_owned()
        }
        FieldType::Handle(_) | FieldType::Minted(_) => "handle()".to_owned(),
        FieldType::OptionalHandle(_) => "prop::option::of(handle())".to_owned(),
        FieldType::Fence => "fence()".to_owned(),
        FieldType::OptionalFence => "prop::option::of(fence())".to_owned(),
        FieldType::Enum(name) => format!("prop::sample::select({name}::ALL)"),
    }
}

fn scalar_strategy(scalar: Scalar, nonzero: bool) -> String {
    match (scalar, nonzero) {
        (Scalar::F32, _) => "prop::num::f32::NORMAL".to_owned(),
        (_, true) => format!("1_{}..", scalar.name()),
        (_, false) => format!("any::<{}>()", scalar.name()),
    }
}
