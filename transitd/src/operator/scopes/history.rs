//! Leaders that tell one droplet of their VPCs, in random order: leaders change, and slots pass between shards.

use fastrand::Rng;
use thuban_rows::Row;

use super::{ALL, NONE, Rows, Scope, ScopedProgram, Table, bouncer, droplet, snapshot};

/// Who leads some slots, or has not noticed yet that others do.
struct Leader {
    epoch: u64,
    scope: Scope,
    is_former: bool,
    /// All rows that should be, as far as the leader knows.
    view: Rows,
    /// The rows that were told on the stream; none: the next program is a snapshot.
    told: Option<Rows>,
}

impl Leader {
    fn next_program(&mut self) -> ScopedProgram {
        let mut own = self.view.clone();
        own.retain(|key, _| Scope::of(key).within(self.scope) != NONE);
        let told = self.told.replace(own.clone());
        let is_snapshot = told.is_none();
        let told = told.unwrap_or_default();
        let gone = told.keys().filter(|key| !own.contains_key(*key));
        let deletes = gone.cloned().collect();
        own.retain(|key, row| told.get(key) != Some(&*row));
        ScopedProgram {
            epoch: self.epoch,
            scope: self.scope,
            is_snapshot,
            upserts: own.into_values().collect(),
            deletes,
        }
    }
}

/// The leaders of a droplet, and the rows that should be.
struct History {
    random: Rng,
    wanted: Rows,
    leaders: Vec<Leader>,
    /// All leaderships count with one counter, whatever slots they have.
    last_epoch: u64,
    table: Table,
    refused: usize,
}

impl History {
    fn step(&mut self) {
        let place = self.random.usize(..self.leaders.len());
        match self.random.u32(..60) {
            0..20 => self.change(),
            20..35 => self.leaders[place].view = self.wanted.clone(),
            35..38 => self.leaders[place].told = None,
            38 if self.leaders[place].is_former => {}
            38 => {
                self.leaders[place].is_former = true;
                self.lead(self.leaders[place].scope);
            }
            39 if self.random.bool() => self.divide(NONE),
            39 => {
                let some = Scope(self.random.u64(..));
                self.divide(some);
            }
            _ => self.tell(place),
        }
    }

    /// Changes a row that should be.
    fn change(&mut self) {
        let (vni, last) = (self.random.u32(1..=6), self.random.u8(1..=4));
        let row = if self.random.bool() {
            droplet(last, self.random.bool())
        } else {
            bouncer(vni, last, self.random.u8(1..=4))
        };
        if self.random.u32(..3) == 0 {
            self.wanted.remove(&row.key());
        } else {
            self.wanted.insert(row.key(), row);
        }
    }

    /// Divides the slots anew, among two leaders or to one: all shards have new leaders.
    fn divide(&mut self, some: Scope) {
        for leader in &mut self.leaders {
            leader.is_former = true;
        }
        for scope in [some, ALL.without(some)] {
            if scope != NONE {
                self.lead(scope);
            }
        }
    }

    fn lead(&mut self, scope: Scope) {
        self.last_epoch += 1;
        let (epoch, view) = (self.last_epoch, self.wanted.clone());
        self.leaders.push(Leader {
            epoch,
            scope,
            is_former: false,
            view,
            told: None,
        });
    }

    /// Has the droplet receive what a leader has not told it yet. A leader that it refuses ends.
    fn tell(&mut self, place: usize) {
        let told = self.leaders[place].next_program();
        let before = (self.table.rows(), self.table.held.clone());
        let others = self.table.beyond(told.scope);
        if self.table.apply(&told).is_ok() {
            assert_eq!(self.table.beyond(told.scope), others, "rows of others stay");
            return;
        }
        let after = (self.table.rows(), self.table.held.clone());
        assert_eq!(after, before, "nothing is half-applied");
        let teller = self.leaders.swap_remove(place);
        assert!(teller.is_former, "who leads is followed");
        self.refused += 1;
    }

    /// Has those who lead tell everything. Whoever still believes to lead then is refused.
    fn settle(&mut self) {
        let (former, leaders): (Vec<_>, Vec<_>) = self.leaders.drain(..).partition(|leader| leader.is_former);
        self.leaders = leaders;
        for place in 0..self.leaders.len() {
            self.leaders[place].view = self.wanted.clone();
            self.tell(place);
        }
        for mut leader in former {
            assert!(
                self.table.apply(&leader.next_program()).is_err(),
                "who led is refused"
            );
        }
    }
}

#[test]
fn shards_tell_a_droplet_what_one_leader_would_tell() {
    let mut refused = 0;
    for seed in 0..300 {
        println!("seed {seed}");
        let mut history = History {
            random: Rng::with_seed(seed),
            wanted: Rows::new(),
            leaders: Vec::new(),
            last_epoch: 0,
            table: Table::default(),
            refused: 0,
        };
        history.divide(NONE);
        for _ in 0..400 {
            history.step();
        }
        history.settle();
        assert_eq!(history.table.rows(), history.wanted);
        let mut one = Table::default();
        let rows: Vec<Row> = history.wanted.into_values().collect();
        one.apply(&snapshot(1, ALL, &rows)).unwrap();
        assert_eq!(history.table.held, one.held);
        refused += history.refused;
    }
    assert!(refused > 100, "{refused} former leaders were refused");
}
