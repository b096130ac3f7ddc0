//! A small random generator for property tests: seeded by the clock, the seed printed with a failure.

use std::time::{SystemTime, UNIX_EPOCH};

pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// Seeds from the clock, or from the variable THUBAN_SEED to repeat a failure.
    pub fn from_clock() -> Self {
        let given = std::env::var("THUBAN_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(1, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or(clock) | 1;
        println!("THUBAN_SEED={seed}");
        Self { seed, state: seed }
    }

    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// xorshift64* (Vigna 2016).
    pub const fn u32(&mut self) -> u32 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    pub const fn below(&mut self, limit: usize) -> usize {
        self.u32() as usize % limit
    }
}
