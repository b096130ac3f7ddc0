//! The source of chance: the seed of a schedule, and nothing else. Hash maps of std and of kube (ahash) take their keys
//! from the system's randomness; here that is a sequence of numbers that follows from the seed.
//!
//! Invariants: each schedule runs in a thread of its own, because std draws keys once for each thread, and the numbers
//! that a thread draws depend on no other thread. Nothing in a schedule uses tokio's generator, which counts the
//! runtimes of the process: `select!` says `biased`, and [`Signal`](crate::signal::Signal) replaces tokio's `watch`.

#![allow(unsafe_code)] // a function of the C library is replaced

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::panic::resume_unwind;
use std::ptr::null_mut;
use std::sync::Once;

use ahash::random_state::{RandomSource, set_random_source};

use thuban_operator::model::policy::Profile;

use crate::random::Random;
use crate::workflow;

thread_local! {
    /// The generator of this thread; outside of schedules that of the seed 0.
    static RANDOM: RefCell<Random> = const { RefCell::new(Random::new(0)) };
}

/// Draws the next number of this thread.
fn draw() -> u64 {
    RANDOM.with_borrow_mut(Random::next)
}

/// Stands in for the C library's function of this name, in this test's process only.
///
/// # Safety
///
/// The contract of the C library: `buffer` has room for `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    for offset in 0..length {
        // SAFETY: the offset is within the caller's buffer.
        unsafe { buffer.add(offset).write(draw() as u8) };
    }
    length.cast_signed()
}

/// Stands in for the C library's function, by which crates look for `getrandom` and find none in a static program: they
/// would read `/dev/urandom`. A static program has no other symbols to find.
///
/// # Safety
///
/// The contract of the C library: `name` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(_library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's promise.
    if unsafe { CStr::from_ptr(name) } == c"getrandom" {
        getrandom as *const () as *mut c_void
    } else {
        null_mut()
    }
}

/// The source of randomness for ahash, which would count the maps of all threads otherwise.
struct OfThread;

impl RandomSource for OfThread {
    fn gen_hasher_seed(&self) -> usize {
        draw() as usize
    }
}

/// Makes everything that is made once for each process before the first schedule, which would have drawn numbers for it
/// otherwise.
fn prepare() {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| {
        let is_first = set_random_source(OfThread).is_ok();
        assert!(is_first, "a hash map of ahash was made before the first schedule");
        workflow::watch();
        let _ = in_thread(0, || {
            let known = Profile::default().shared();
            (
                ahash::RandomState::with_seed(0),
                thuban_operator::metrics::text(),
                known,
            )
        });
    });
}

fn in_thread<T: Send>(seed: u64, run: impl FnOnce() -> T + Send) -> T {
    let run = || {
        RANDOM.set(Random::new(seed));
        run()
    };
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

/// Runs `run` in a thread that draws all its randomness from the seed, and orders hash maps in the `order`th of many
/// ways.
pub fn seeded<T: Send>(seed: u64, order: u64, run: impl FnOnce() -> T + Send) -> T {
    prepare();
    // These are not the numbers that the schedule draws itself.
    in_thread(!(seed ^ order.rotate_right(16)), || {
        fastrand::seed(seed);
        run()
    })
}
