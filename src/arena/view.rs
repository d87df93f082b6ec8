//! All that a reader may ask.
use super::Labels;

/// The index at one moment.
#[derive(Debug)]
pub struct ReadView(());

impl ReadView {
    /// The labels of all workers, to be kept after the view is let go.
    pub fn labels(&self) -> Labels {
        unimplemented!()
    }
}
