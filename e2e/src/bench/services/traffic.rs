//! The traffic of the pods. Backends answer one byte with their number, or take whatever comes. The client makes
//! connections or sends. The client's threads are on one core and the backends' on another. Connections have priority
//! over all other work of the machine. Streams have a little less, because they would leave the control plane nothing.
//!
//! A backend closes first, so that waiting sockets are the backend's and the client's ports are free again at once.
//! Each way to a backend has ports of its own. Thuban can't tell apart two connections from one port to one backend, by
//! two Services or by one and directly, while it remembers the first one (docs/dataplane.md).

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket,
            sockopt::{ReceiveTimeout, ReuseAddr, SendTimeout},
        },
        time::{TimeVal, TimeValLike},
    },
};
use thuban_cluster::wait::uninterrupted;

use crate::bench::{
    float,
    pods::Pod,
    process::{CLIENT_CORE, SERVER_CORE, pin, prefer},
    stats::sorted,
    wait_for_answer,
};

pub const ANSWERS: u16 = 7000;
pub const SINK: u16 = 7001;
/// How long a connection may take. Longer than the kernel's first repetition of a lost SYN.
const WAIT: Duration = Duration::from_secs(3);
/// How long a connection may take before anything is measured.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Requests to each target before anything is measured.
const FIRST_REQUESTS: usize = 50;
/// How long it takes until caches and windows are stable.
const WARM_UP: Duration = Duration::from_millis(300);
const BLOCK: usize = 128 << 10;
/// The pause when all streams are full: shorter than the time that data on the way lasts.
const FULL: Duration = Duration::from_micros(50);

/// Bytes that backends of one cluster took.
pub type Taken = Arc<AtomicU64>;

/// Starts the work of a backend, until this program ends.
pub fn serve(pod: &Pod, number: u8, taken: &Taken) -> Result<()> {
    let (told, listens) = mpsc::channel();
    let (answers, sink) = (pod.clone(), pod.clone());
    let (told_too, taken) = (told.clone(), Arc::clone(taken));
    thread::spawn(move || {
        let listener = pin(SERVER_CORE).and_then(|()| listen(&answers, ANSWERS));
        if let Some(listener) = pass_error(listener, &told) {
            answer(&listener, number);
        }
    });
    thread::spawn(move || {
        // A thread that it spawns has the same priority.
        let listener = prefer(SERVER_CORE).and_then(|()| listen(&sink, SINK));
        if let Some(listener) = pass_error(listener, &told_too) {
            take(&listener, &taken);
        }
    });
    for _ in 0..2 {
        let listens: Result<()> = listens.recv().context("a backend has ended")?;
        listens.with_context(|| pod.name.clone())?;
    }
    Ok(())
}

/// Starts to give back each byte of connections to a port of a pod, until this program ends.
pub fn echo(pod: &Pod, port: u16) -> Result<()> {
    let (pod, (told, listens)) = (pod.clone(), mpsc::channel());
    thread::spawn(move || {
        let listener = pass_error(listen(&pod, port), &told);
        for stream in listener.iter().flat_map(TcpListener::incoming).flatten() {
            thread::spawn(move || {
                let (mut stream, mut byte) = (stream, [0]);
                while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
            });
        }
    });
    listens.recv().context("a backend has ended")?
}

fn listen(pod: &Pod, port: u16) -> Result<TcpListener> {
    pod.enter()?;
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).context("listening")
}

fn pass_error(listener: Result<TcpListener>, to: &mpsc::Sender<Result<()>>) -> Option<TcpListener> {
    let (told, listener) = match listener {
        Ok(listener) => (Ok(()), Some(listener)),
        Err(error) => (Err(error), None),
    };
    let _ = to.send(told);
    listener
}

/// Answers clients. An error with a client is the client's error.
fn answer(listener: &TcpListener, number: u8) {
    for stream in listener.incoming() {
        let answered = stream.and_then(|mut stream| {
            stream.set_read_timeout(Some(WAIT))?;
            stream.set_nodelay(true)?;
            stream.read_exact(&mut [0])?;
            stream.write_all(&[number])
        });
        drop(answered);
    }
}

fn take(listener: &TcpListener, taken: &Taken) {
    for stream in listener.incoming() {
        let (Ok(mut stream), taken) = (stream, Arc::clone(taken)) else {
            continue;
        };
        thread::spawn(move || {
            let mut block = vec![0; BLOCK];
            while let Ok(length) = uninterrupted(|| stream.read(&mut block)) {
                if length == 0 {
                    break;
                }
                taken.fetch_add(length as u64, Ordering::Relaxed);
            }
        });
    }
}

/// A destination of connections, and the ports that they come from, one after the other and then again.
#[derive(Debug)]
pub struct Target {
    pub address: Ipv4Addr,
    first: u16,
    next: AtomicU32,
}

const FIRST_PORT: u16 = 2048;
/// Ports of a target: more than the connections that it gets within the minute that closed ones are remembered.
const PORTS: u16 = 10_400;

impl Target {
    /// `way`: 0 to 5; targets that share a backend must not share it.
    pub fn new(address: Ipv4Addr, way: u16) -> Self {
        Self {
            address,
            first: FIRST_PORT + way * PORTS,
            next: AtomicU32::new(0),
        }
    }

    fn connect(&self, within: Duration) -> Result<TcpStream> {
        // connect(2) waits as long as a send may take.
        let within = TimeVal::milliseconds(i64::try_from(within.as_millis())?);
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed) % u32::from(PORTS);
            let flags = SockFlag::SOCK_CLOEXEC;
            let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None).context("a socket")?;
            setsockopt(&socket, SendTimeout, &within)?;
            setsockopt(&socket, ReceiveTimeout, &within)?;
            // One port serves connections to several backends.
            setsockopt(&socket, ReuseAddr, &true)?;
            let own = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, self.first + number as u16);
            match bind(socket.as_raw_fd(), &SockaddrIn::from(own)) {
                Ok(()) => {}
                // A stream of this pod has this port.
                Err(Errno::EADDRINUSE) => continue,
                Err(error) => return Err(error).context("binding"),
            }
            let other = SocketAddrV4::new(self.address, ANSWERS);
            connect(socket.as_raw_fd(), &SockaddrIn::from(other)).context("connecting")?;
            return Ok(socket.into());
        }
    }
}

/// Connects, asks one byte, gets one byte, and reads the end; returns the number of the backend. Works in the calling
/// thread's namespace.
pub fn ask(target: &Target, within: Duration) -> Result<u8> {
    let mut stream = target.connect(within)?;
    stream.set_nodelay(true)?;
    stream.write_all(&[1])?;
    let mut answer = [0; 2];
    ensure!(uninterrupted(|| stream.read(&mut answer))? == 1, "no answer");
    ensure!(
        uninterrupted(|| stream.read(&mut answer[1..]))? == 0,
        "more than an answer"
    );
    Ok(answer[0])
}

/// Waits until all targets answer the client. An error of `go_on` ends the wait at once.
pub fn wait_for_answers<'a>(
    client: &Pod,
    targets: impl IntoIterator<Item = &'a Target>,
    patience: Duration,
    mut go_on: impl FnMut() -> Result<()>,
) -> Result<()> {
    let start = Instant::now();
    for target in targets {
        let what = format!("an answer of {}", target.address);
        let patience = patience.saturating_sub(start.elapsed());
        wait_for_answer(&what, patience, &mut go_on, || {
            client.run(|| ask(target, FIRST_WAIT))
        })?;
    }
    Ok(())
}

/// Asks each target several times, so that rows that are made at the first use exist.
pub fn warm_up(client: &Pod, targets: &[&Target]) -> Result<()> {
    client.run(|| {
        for target in targets.iter().cycle().take(targets.len() * FIRST_REQUESTS) {
            // A failure is told by the measures.
            let _ = ask(target, FIRST_WAIT);
        }
        Ok(())
    })
}

/// Connections of one measure.
#[derive(Debug)]
pub struct Connections {
    /// Microseconds of each connection that was answered, ascending.
    pub micros: Vec<f64>,
    pub per_second: f64,
    /// Number of connections that were not answered.
    pub failed: usize,
}

/// The most connections of one measure: a contestant remembers closed ones for a minute or longer, and has no room for
/// those of all measures otherwise.
const MAX_CONNECTIONS: usize = 8000;

/// Makes connections to the targets in turns, by this many workers at once, from the pods in turns.
pub fn connections(
    clients: &[Pod],
    targets: &[Target],
    workers: usize,
    time: Duration,
) -> Result<Connections> {
    // All threads have one window: threads that begin and end by themselves would be counted when they have the core
    // alone.
    let start = Instant::now() + WARM_UP;
    let most = MAX_CONNECTIONS / workers;
    let work = |worker: usize| {
        pin(CLIENT_CORE)?;
        let (mut times, mut failed, mut window) = (Vec::new(), 0, time);
        for target in targets.iter().cycle().skip(worker) {
            let began = Instant::now();
            if began > start + time {
                break;
            }
            if times.len() >= most {
                window = began - start;
                break;
            }
            match ask(target, WAIT) {
                Ok(_) if began > start => times.push(began.elapsed()),
                Ok(_) => {}
                Err(_) => failed += 1,
            }
        }
        anyhow::Ok((times, failed, window))
    };
    let work = &work;
    let done: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|worker| scope.spawn(move || clients[worker % clients.len()].run(|| work(worker))))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a client panicked"))?)
            .collect::<Result<_>>()
    })?;
    let failed = done.iter().map(|(_, failed, _)| failed).sum();
    let rate = |(times, _, window): &(Vec<Duration>, usize, Duration)| {
        float(times.len() as u64) / window.as_secs_f64()
    };
    let per_second = done.iter().map(rate).sum();
    let times = done.into_iter().flat_map(|(times, ..)| times);
    let micros = sorted(times.map(|time: Duration| time.as_secs_f64() * 1e6));
    if micros.len() < 100 {
        bail!("only {} connections, {failed} failed", micros.len());
    }
    Ok(Connections {
        micros,
        per_second,
        failed,
    })
}

/// Returns the gigabits a second that arrive through this many streams to the targets in turns. One thread sends all of
/// them: several threads that are never idle would keep the kernel from its own part.
pub fn throughput(
    client: &Pod,
    targets: &[Target],
    streams: usize,
    taken: &Taken,
    time: Duration,
) -> Result<f64> {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let send = || {
            let targets = targets.iter().cycle().take(streams);
            let open = |target: &Target| {
                let stream = TcpStream::connect_timeout(&SocketAddr::from((target.address, SINK)), WAIT)?;
                stream.set_nonblocking(true)?;
                anyhow::Ok(stream)
            };
            let streams = targets
                .map(open)
                .collect::<Result<Vec<_>>>()
                .context("connecting")?;
            prefer(CLIENT_CORE)?;
            send(&streams, &is_done)
        };
        let sender = scope.spawn(move || client.run(send));
        thread::sleep(WARM_UP);
        let (start, before) = (Instant::now(), taken.load(Ordering::Relaxed));
        thread::sleep(time);
        let (seconds, bytes) = (start.elapsed(), taken.load(Ordering::Relaxed) - before);
        is_done.store(true, Ordering::Relaxed);
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        ensure!(bytes > 1_000_000, "only {bytes} bytes arrived");
        Ok(float(bytes) * 8.0 / 1e9 / seconds.as_secs_f64())
    })
}

/// Keeps all streams full until it is done.
fn send(streams: &[TcpStream], is_done: &AtomicBool) -> Result<()> {
    let block = vec![0x55; BLOCK];
    while !is_done.load(Ordering::Relaxed) {
        let mut is_full = true;
        for mut stream in streams {
            match stream.write(&block) {
                Ok(_) => is_full = false,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("sending"),
            }
        }
        if is_full {
            thread::sleep(FULL);
        }
    }
    Ok(())
}
