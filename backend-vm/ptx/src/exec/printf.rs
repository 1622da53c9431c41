//! Formats the output of kernels, by C's rules (CUDA C++ Programming Guide, Formatted Output).

use super::builtin::text;
use super::memory::Spaces;
use crate::decode::insn::AddressSpace;
use crate::error::FaultKind;

/// Maximum bytes of text that one call prints.
const MAX_OUTPUT: usize = 1 << 20;
/// Maximum width of a field; wider ones are narrowed to it.
const MAX_WIDTH: usize = 4096;

#[derive(Debug, Default, Clone)]
struct Spec {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
    /// Bytes of an integer argument: 1, 2, 4 or 8.
    bytes: u32,
}

/// Reader of the arguments in the buffer that `vprintf` receives.
struct Arguments<'s, 'w, 'a> {
    spaces: &'s mut Spaces<'w, 'a>,
    lane: usize,
    at: u64,
    count: u64,
}

impl Arguments<'_, '_, '_> {
    fn word(&mut self) -> Result<u32, FaultKind> {
        let value = self
            .spaces
            .read(AddressSpace::Generic, self.lane, self.at)?;
        self.at = self.at.wrapping_add(4);
        self.count += 1;
        Ok(value)
    }

    fn double_word(&mut self) -> Result<u64, FaultKind> {
        self.at = self.at.wrapping_add(7) & !7;
        let value = self
            .spaces
            .read(AddressSpace::Generic, self.lane, self.at)?;
        self.at = self.at.wrapping_add(8);
        self.count += 1;
        Ok(value)
    }
}

/// Formats the text at `format` with the arguments at `list`. Returns the text and the number of
/// arguments.
pub(super) fn format(
    spaces: &mut Spaces<'_, '_>,
    lane: usize,
    format: u64,
    list: u64,
) -> Result<(Vec<u8>, u64), FaultKind> {
    let format = text(spaces, lane, format)?;
    let mut arguments = Arguments {
        spaces,
        lane,
        at: list,
        count: 0,
    };
    let mut out = Vec::with_capacity(format.len());
    let mut rest = &format[..];
    while let [c, tail @ ..] = rest
        && out.len() < MAX_OUTPUT
    {
        rest = tail;
        if *c != b'%' {
            out.push(*c);
            continue;
        }
        let start = rest;
        let (spec, conversion) = parse(&mut rest, &mut arguments)?;
        match conversion {
            Some(b'%') => out.push(b'%'),
            Some(conversion) => {
                if !convert(&mut out, &spec, conversion, &mut arguments)? {
                    // An unknown conversion is printed unchanged.
                    out.push(b'%');
                    out.extend_from_slice(&start[..start.len() - rest.len()]);
                }
            }
            None => {
                out.push(b'%');
                out.extend_from_slice(start);
            }
        }
    }
    let count = arguments.count;
    Ok((out, count))
}

fn parse(
    rest: &mut &[u8],
    arguments: &mut Arguments<'_, '_, '_>,
) -> Result<(Spec, Option<u8>), FaultKind> {
    let mut spec = Spec {
        bytes: 4,
        ..Spec::default()
    };
    let mut next = || match *rest {
        [c, tail @ ..] => {
            *rest = tail;
            Some(*c)
        }
        [] => None,
    };
    let mut c = next();
    loop {
        match c {
            Some(b'-') => spec.left = true,
            Some(b'+') => spec.plus = true,
            Some(b' ') => spec.space = true,
            Some(b'#') => spec.alternate = true,
            Some(b'0') => spec.zero = true,
            _ => break,
        }
        c = next();
    }
    if c == Some(b'*') {
        let width = arguments.word()?.cast_signed();
        spec.left |= width < 0;
        spec.width = (width.unsigned_abs() as usize).min(MAX_WIDTH);
        c = next();
    }
    while let Some(digit @ b'0'..=b'9') = c {
        spec.width = (spec.width * 10 + usize::from(digit - b'0')).min(MAX_WIDTH);
        c = next();
    }
    if c == Some(b'.') {
        c = next();
        let mut precision = 0;
        if c == Some(b'*') {
            precision = usize::try_from(arguments.word()?.cast_signed())
                .unwrap_or(0)
                .min(MAX_WIDTH);
            c = next();
        }
        while let Some(digit @ b'0'..=b'9') = c {
            precision = (precision * 10 + usize::from(digit - b'0')).min(MAX_WIDTH);
            c = next();
        }
        spec.precision = Some(precision);
    }
    loop {
        match c {
            Some(b'h') => spec.bytes = if spec.bytes == 2 { 1 } else { 2 },
            Some(b'l' | b'j' | b'z' | b't' | b'q' | b'L') => spec.bytes = 8,
            _ => break,
        }
        c = next();
    }
    Ok((spec, c))
}

fn convert(
    out: &mut Vec<u8>,
    spec: &Spec,
    conversion: u8,
    arguments: &mut Arguments<'_, '_, '_>,
) -> Result<bool, FaultKind> {
    match conversion {
        b'd' | b'i' => {
            let value = integer(spec, arguments)?;
            let shift = 64 - 8 * spec.bytes;
            let value = (value << shift).cast_signed() >> shift;
            number(
                out,
                spec,
                sign(spec, value < 0),
                "",
                &value.unsigned_abs().to_string(),
            );
        }
        b'u' => {
            let value = unsigned(spec, arguments)?;
            number(out, spec, "", "", &value.to_string());
        }
        b'o' => {
            let value = unsigned(spec, arguments)?;
            number(
                out,
                spec,
                "",
                if spec.alternate { "0" } else { "" },
                &format!("{value:o}"),
            );
        }
        b'x' | b'X' => {
            let value = unsigned(spec, arguments)?;
            let upper = conversion == b'X';
            let digits = if upper {
                format!("{value:X}")
            } else {
                format!("{value:x}")
            };
            let prefix = match (spec.alternate && value != 0, upper) {
                (false, _) => "",
                (true, false) => "0x",
                (true, true) => "0X",
            };
            number(out, spec, "", prefix, &digits);
        }
        b'p' => {
            let value = arguments.double_word()?;
            let digits = if value == 0 {
                "(nil)".to_owned()
            } else {
                format!("{value:#x}")
            };
            pad(out, spec, "", digits.as_bytes(), false);
        }
        b'c' => {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a character is the low byte"
            )]
            let value = arguments.word()? as u8;
            pad(out, spec, "", &[value], false);
        }
        b's' => {
            let address = arguments.double_word()?;
            let mut value = if address == 0 {
                b"(null)".to_vec()
            } else {
                text(arguments.spaces, arguments.lane, address)?
            };
            if let Some(precision) = spec.precision {
                value.truncate(precision);
            }
            pad(out, spec, "", &value, false);
        }
        b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a' | b'A' => {
            let value = f64::from_bits(arguments.double_word()?);
            float(out, spec, conversion, value);
        }
        b'n' => {
            arguments.double_word()?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn integer(spec: &Spec, arguments: &mut Arguments<'_, '_, '_>) -> Result<u64, FaultKind> {
    if spec.bytes == 8 {
        arguments.double_word()
    } else {
        arguments.word().map(u64::from)
    }
}

fn unsigned(spec: &Spec, arguments: &mut Arguments<'_, '_, '_>) -> Result<u64, FaultKind> {
    let shift = 64 - 8 * spec.bytes;
    Ok(integer(spec, arguments)? << shift >> shift)
}

fn sign(spec: &Spec, negative: bool) -> &'static str {
    match (negative, spec.plus, spec.space) {
        (true, ..) => "-",
        (false, true, _) => "+",
        (false, false, true) => " ",
        _ => "",
    }
}

/// Prints an integer. The precision is the minimum number of digits.
fn number(out: &mut Vec<u8>, spec: &Spec, sign: &str, prefix: &str, digits: &str) {
    let wanted = spec.precision.unwrap_or(1);
    let digits = if digits == "0" && wanted == 0 {
        ""
    } else {
        digits
    };
    let zeros = "0".repeat(wanted.saturating_sub(digits.len()));
    let head = format!("{sign}{prefix}");
    pad(
        out,
        spec,
        &head,
        format!("{zeros}{digits}").as_bytes(),
        spec.zero && spec.precision.is_none(),
    );
}

fn pad(out: &mut Vec<u8>, spec: &Spec, head: &str, body: &[u8], zeros: bool) {
    let missing = spec.width.saturating_sub(head.len() + body.len());
    let fill = |out: &mut Vec<u8>, c: u8| out.extend(std::iter::repeat_n(c, missing));
    if spec.left {
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(body);
        fill(out, b' ');
    } else if zeros {
        out.extend_from_slice(head.as_bytes());
        fill(out, b'0');
        out.extend_from_slice(body);
    } else {
        fill(out, b' ');
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(body);
    }
}

fn float(out: &mut Vec<u8>, spec: &Spec, conversion: u8, value: f64) {
    let head = sign(spec, value.is_sign_negative() && !value.is_nan());
    let magnitude = value.abs();
    let upper = conversion.is_ascii_uppercase();
    let case = |text: String| {
        if upper {
            text.to_ascii_uppercase()
        } else {
            text
        }
    };
    if !magnitude.is_finite() {
        let text = case(if magnitude.is_nan() { "nan" } else { "inf" }.to_owned());
        pad(out, spec, head, text.as_bytes(), false);
        return;
    }
    let precision = spec.precision.unwrap_or(6);
    let body = match conversion.to_ascii_lowercase() {
        b'f' => fixed(magnitude, precision, spec.alternate),
        b'e' => exponential(magnitude, precision, spec.alternate),
        b'a' => hexadecimal(magnitude, spec.precision),
        _ => general(magnitude, precision.max(1), spec.alternate),
    };
    pad(out, spec, head, case(body).as_bytes(), spec.zero);
}

fn fixed(value: f64, precision: usize, alternate: bool) -> String {
    let point = if alternate && precision == 0 { "." } else { "" };
    format!("{value:.precision$}{point}")
}

fn exponential(value: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{value:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let point = if alternate && precision == 0 { "." } else { "" };
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}{point}e{sign}{:02}", exponent.abs())
}

fn general(value: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{value:.*e}", precision - 1);
    let exponent: i32 = text
        .split_once('e')
        .and_then(|(_, e)| e.parse().ok())
        .unwrap_or(0);
    let limit = i32::try_from(precision).unwrap_or(i32::MAX);
    let strip = |text: String| {
        if alternate || !text.contains('.') {
            return text;
        }
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    if exponent < -4 || exponent >= limit {
        let text = exponential(value, precision - 1, alternate);
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "+00"));
        format!("{}e{exponent}", strip(mantissa.to_owned()))
    } else {
        let decimals = usize::try_from(limit - 1 - exponent).unwrap_or(0);
        strip(fixed(value, decimals, alternate))
    }
}

fn hexadecimal(value: f64, precision: Option<usize>) -> String {
    let bits = value.to_bits();
    let mut mantissa = bits & ((1 << 52) - 1);
    let biased = bits >> 52;
    let mut lead = u64::from(biased != 0);
    let exponent = match (biased, mantissa) {
        (0, 0) => 0,
        (0, _) => -1022,
        _ => i64::try_from(biased).unwrap_or(0) - 1023,
    };
    let mut digits = 13;
    if let Some(precision) = precision.filter(|&precision| precision < 13) {
        let shift = 4 * (13 - precision);
        let whole = lead << 52 | mantissa;
        let (kept, rest, half) = (
            whole >> shift,
            whole & ((1 << shift) - 1),
            1_u64 << (shift - 1),
        );
        let kept = kept + u64::from(rest > half || rest == half && kept & 1 == 1);
        (lead, mantissa, digits) = (
            kept >> (4 * precision),
            kept & ((1 << (4 * precision)) - 1),
            precision,
        );
    }
    let fraction = if digits == 0 {
        String::new()
    } else {
        format!("{mantissa:0digits$x}")
    };
    let fraction = match precision {
        Some(precision) => format!("{fraction}{}", "0".repeat(precision.saturating_sub(13))),
        None => fraction.trim_end_matches('0').to_owned(),
    };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("0x{lead}{point}{fraction}p{exponent:+}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_c(format: u8, precision: Option<usize>, value: f64) -> String {
        let mut out = Vec::new();
        float(
            &mut out,
            &Spec {
                precision,
                bytes: 4,
                ..Spec::default()
            },
            format,
            value,
        );
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn floats_print_as_in_c() {
        assert_eq!(as_c(b'f', None, 1.5), "1.500000");
        assert_eq!(as_c(b'e', None, 12345.678), "1.234568e+04");
        assert_eq!(as_c(b'g', None, 0.0001), "0.0001");
        assert_eq!(as_c(b'g', None, 1e-5), "1e-05");
        assert_eq!(as_c(b'g', None, 1_000_000.0), "1e+06");
        assert_eq!(as_c(b'g', Some(3), 100.0), "100");
        assert_eq!(as_c(b'a', None, 1.0), "0x1p+0");
        assert_eq!(as_c(b'a', Some(1), 1.96875), "0x2.0p+0");
        assert_eq!(as_c(b'f', Some(0), -2.5), "-2");
        assert_eq!(as_c(b'G', None, f64::INFINITY), "INF");
    }

    #[test]
    fn integers_print_as_in_c() {
        let mut out = Vec::new();
        let spec = Spec {
            width: 6,
            zero: true,
            bytes: 4,
            ..Spec::default()
        };
        number(&mut out, &spec, "-", "", "42");
        let spec = Spec {
            width: 6,
            precision: Some(3),
            bytes: 4,
            ..Spec::default()
        };
        number(&mut out, &spec, "", "0x", "7");
        assert_eq!(out, b"-00042 0x007");
    }
}
