//! Long loops that let other tasks go on: streams must not end because a list is long.

/// How many steps a loop takes before other tasks have their turn.
const TURN: usize = 64;

/// The steps of a loop.
#[derive(Debug, Default)]
pub struct Turns(usize);

impl Turns {
    /// Ends a step.
    pub async fn pass(&mut self) {
        self.0 += 1;
        if self.0.is_multiple_of(TURN) {
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{TURN, Turns};

    #[tokio::test]
    async fn others_go_on_before_a_long_loop_ends() {
        let has_run = Arc::new(AtomicBool::new(false));
        let other = has_run.clone();
        tokio::spawn(async move { other.store(true, Ordering::Relaxed) });
        let mut turns = Turns::default();
        for _ in 1..TURN {
            turns.pass().await;
        }
        assert!(!has_run.load(Ordering::Relaxed));
        turns.pass().await;
        assert!(has_run.load(Ordering::Relaxed));
    }
}
