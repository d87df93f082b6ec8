//! Prometheus' text, family by family.
//!
//! A thin face over prometheus-client: whoever has values walks them once per
//! scrape and writes each family with all its rows, so that a series exists
//! exactly as long as what it tells of. Label values may be any text.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, prometheus_text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::histogram::Reading;

/// Writes one scrape. `name` is a family's whole name, but for a counter's `_total`.
#[derive(Debug)]
pub struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    /// Counters, one per set of labels.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn counters<'l>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<(&'l str, &'l str)>, u64)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Counter, rows, |value, encoder| {
            ConstCounter::new(*value).encode(encoder)
        })
    }

    /// Gauges, one per set of labels.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn gauges<'l>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<(&'l str, &'l str)>, f64)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, rows, |value, encoder| {
            ConstGauge::new(*value).encode(encoder)
        })
    }

    /// Histograms, one per set of labels.
    ///
    /// # Errors
    /// The text cannot be written.
    pub fn histograms<'l>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<(&'l str, &'l str)>, Reading)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Histogram, rows, |value, mut encoder| {
            encoder.encode_histogram::<NoLabelSet>(value.sum(), value.count(), &value.buckets(), None)
        })
    }

    fn family<'l, T>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        rows: impl IntoIterator<Item = (Vec<(&'l str, &'l str)>, T)>,
        write: impl Fn(&T, MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        // The unit stands in the name already, as this form has no line for it.
        let unit: Option<&Unit> = None;
        let mut encoder = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in rows {
            write(&value, encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The text that `write` makes, in Prometheus' format 0.0.4.
pub fn expose(write: impl Fn(&mut Writer<'_>) -> fmt::Result + Send + Sync + 'static) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Written(write)));
    let mut text = String::new();
    // A string takes all that is written, and nothing else can fail.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

/// A function as prometheus-client asks for it.
struct Written<F>(F);

impl<F> fmt::Debug for Written<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Written")
    }
}

impl<F: Fn(&mut Writer<'_>) -> fmt::Result + Send + Sync + 'static> Collector for Written<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.0)(&mut Writer(encoder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Histogram, Scale};

    #[test]
    fn families_are_written_whole_and_label_values_escaped() {
        let text = expose(|writer| {
            writer.counters("kv_test_things", "Things.", [(vec![("name", "a\"b\\c\nd")], 3), (vec![], 4)])?;
            writer.gauges("kv_test_level_bytes", "Level.", [(vec![], 1.5)])?;
            let histogram = Histogram::new(Scale::Seconds, &[250, 1_000_000]);
            histogram.record(300);
            writer.histograms("kv_test_time_seconds", "Time.", [(vec![("k", "v")], histogram.read())])
        });
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.contains(&"# HELP kv_test_things_total Things."), "{text}");
        assert!(lines.contains(&"# TYPE kv_test_things_total counter"), "{text}");
        assert!(lines.contains(&r#"kv_test_things_total{name="a\"b\\c\nd"} 3"#), "{text}");
        assert!(lines.contains(&"kv_test_things_total 4"), "{text}");
        assert!(lines.contains(&"kv_test_level_bytes 1.5"), "{text}");
        assert!(lines.contains(&r#"kv_test_time_seconds_bucket{k="v",le="0.001"} 1"#), "{text}");
        assert!(lines.contains(&r#"kv_test_time_seconds_bucket{k="v",le="+Inf"} 1"#), "{text}");
        assert!(lines.contains(&r#"kv_test_time_seconds_count{k="v"} 1"#), "{text}");
    }
}
