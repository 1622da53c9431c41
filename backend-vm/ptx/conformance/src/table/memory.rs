//! Loads and stores of every width, of single elements and of vectors.

use crate::form::Form;
use crate::operands::Class::Int;

const TYPES: [&str; 8] = ["u8", "s8", "u16", "s16", "u32", "s32", "b64", "b8"];

/// Returns the register width of an element: bytes and halves are extended.
fn register(ty: &str) -> u32 {
    if super::bits(ty) == 64 { 64 } else { 32 }
}

pub fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for space in ["global", "shared", "local", "generic"] {
        let (address, declared) = match space {
            "global" | "generic" => ("%m", ""),
            "shared" => ("%s", ""),
            _ => ("own", ".local .align 16 .b8 own[32];"),
        };
        let dot = if space == "generic" {
            String::new()
        } else {
            format!(".{space}")
        };
        for ty in TYPES {
            for count in [1_usize, 2, 4] {
                let wide = register(ty);
                if wide == 64 && count == 4 {
                    continue;
                }
                let names: Vec<_> = (0..count).map(|i| format!("%o{i}")).collect();
                let (list, vector) = match count {
                    1 => (names[0].clone(), String::new()),
                    _ => (format!("{{{}}}", names.join(", ")), format!(".v{count}")),
                };
                let name = format!("ld{dot}{vector}.{ty}");
                let body = format!(
                    "{declared} st{dot}.v2.b64 [{address}], {{%i0, %i1}}; {name} {list}, [{address}];"
                );
                let outputs = vec![wide; count];
                forms.push(Form::new(&name, &[Int(64); 2], &outputs, body).rows(16));
                if ty.starts_with('s') {
                    continue;
                }
                let name = format!("st{dot}{vector}.{ty}");
                let list = list.replace("%o", "%i");
                let body = format!(
                    "{declared} .reg .b64 %z; mov.b64 %z, 0x1122334455667788;
st{dot}.v2.b64 [{address}], {{%z, %z}}; {name} [{address}], {list};
ld{dot}.v2.b64 {{%o0, %o1}}, [{address}];"
                );
                let inputs = vec![Int(wide); count];
                forms.push(Form::new(&name, &inputs, &[64, 64], body).rows(16));
            }
        }
    }
    for (pieces, names) in [
        (2, ["b32", "b64"]),
        (2, ["b16", "b32"]),
        (4, ["b16", "b64"]),
    ] {
        let wide = super::bits(names[1]);
        let list: Vec<_> = (0..pieces).map(|i| format!("%o{i}")).collect();
        let body = format!("mov.{} {{{}}}, %i0;", names[1], list.join(", "));
        let outputs = vec![super::bits(names[0]); pieces];
        let name = format!("mov.{} into {pieces}", names[1]);
        forms.push(Form::new(&name, &[Int(wide)], &outputs, body).rows(16));
        let list: Vec<_> = (0..pieces).map(|i| format!("%i{i}")).collect();
        let body = format!("mov.{} %o0, {{{}}};", names[1], list.join(", "));
        let name = format!("mov.{} of {pieces}", names[1]);
        let inputs = vec![Int(super::bits(names[0])); pieces];
        forms.push(Form::new(&name, &inputs, &[wide], body).rows(16));
    }
    forms
}
