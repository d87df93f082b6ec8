//! A caller's W3C trace context on the span of its call.
//!
//! Asked for by a setting, each call runs in a span at level DEBUG with its method
//! and, where the caller sent a well-formed `traceparent`, the ids of the trace and
//! of the caller's span. Whatever is logged while the call runs then carries them,
//! and at DEBUG one line tells of its end. Without the setting nothing is read and
//! no span is made.

use http::HeaderMap;
use tracing::Span;
use tracing::field::Empty;

use super::observe::Method;

/// The span of a call of `method`.
pub(super) fn span(method: Method, headers: &HeaderMap) -> Span {
    let span = tracing::debug_span!("call", method = method.name(), trace_id = Empty, parent_id = Empty);
    if !span.is_disabled()
        && let Some((trace, parent)) = headers.get("traceparent").and_then(|value| parse(value.as_bytes()))
    {
        span.record("trace_id", trace).record("parent_id", parent);
    }
    span
}

/// The ids in a `traceparent`: version, trace, parent and flags in lower-case hex.
///
/// A version past 00 may have more behind its flags; ff is none, and neither are
/// ids of zeros. Whatever else comes is left out, so nothing a peer invents gets
/// into the log.
fn parse(value: &[u8]) -> Option<(&str, &str)> {
    let text = std::str::from_utf8(value).ok()?;
    let (head, rest) = text.split_at_checked(55)?;
    let mut parts = head.split('-');
    let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits
            && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let is_id = |text: &str, digits| is_hex(text, digits) && text.bytes().any(|byte| byte != b'0');
    let may_go_on = version != "00" && rest.starts_with('-');
    let is_good = is_hex(version, 2)
        && version != "ff"
        && is_id(trace, 32)
        && is_id(parent, 16)
        && is_hex(flags, 2)
        && parts.next().is_none()
        && (rest.is_empty() || may_go_on);
    is_good.then_some((trace, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    #[test]
    fn well_formed_contexts_are_read() {
        for value in [
            format!("00-{TRACE}-{PARENT}-01"),
            format!("00-{TRACE}-{PARENT}-00"),
            format!("cc-{TRACE}-{PARENT}-01-what-comes-later"),
        ] {
            assert_eq!(parse(value.as_bytes()), Some((TRACE, PARENT)), "{value}");
        }
    }

    #[test]
    fn others_are_none() {
        let zeros = "0".repeat(32);
        for value in [
            String::new(),
            "00".to_owned(),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{zeros}-{PARENT}-01"),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{PARENT}-01-more"),
            format!("cc-{TRACE}-{PARENT}-01.more"),
            format!("00-{TRACE}-{PARENT}-0"),
            format!("00-{TRACE}{PARENT}--01"),
            format!("00-{TRACE}-{PARENT}-0\n"),
            format!("00-{}é-{PARENT}-01", &TRACE[..30]),
        ] {
            assert_eq!(parse(value.as_bytes()), None, "{value:?}");
        }
        assert_eq!(parse(&[0xff; 55]), None);
    }
}
