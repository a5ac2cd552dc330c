"""The example database: a small railway. Made up, and the same at every run.

Seven tables whose short column names say little, as in many a real database: finding the right ones is part of the task. Most
columns have a comment in the CREATE statement, which SQLite keeps.
"""

from __future__ import annotations

import random
import sqlite3
from datetime import date, timedelta
from pathlib import Path

from hexrepro.errors import InputError

SCHEMA = """
CREATE TABLE STN (  -- stations
    STN_CD TEXT PRIMARY KEY,  -- station code
    STN_NM TEXT NOT NULL,  -- name
    RGN TEXT NOT NULL,  -- region
    PLTF_CNT INTEGER NOT NULL,  -- number of platforms
    OPN_YR INTEGER NOT NULL  -- year of opening
);
CREATE TABLE LN (  -- lines
    LN_NO INTEGER PRIMARY KEY,  -- line number
    LN_NM TEXT NOT NULL,  -- name
    TYP TEXT NOT NULL  -- IC intercity, RE regional express, RB local
);
CREATE TABLE LN_STP (  -- stops of each line, in order
    LN_NO INTEGER NOT NULL REFERENCES LN (LN_NO),
    SEQ INTEGER NOT NULL,  -- position on the line, from 1
    STN_CD TEXT NOT NULL REFERENCES STN (STN_CD),
    KM REAL NOT NULL,  -- distance from the first stop in km
    PRIMARY KEY (LN_NO, SEQ)
);
CREATE TABLE VEH (  -- vehicles (train sets)
    VEH_ID INTEGER PRIMARY KEY,
    MDL TEXT NOT NULL,  -- model
    CAP INTEGER NOT NULL,  -- seats
    BLT_YR INTEGER NOT NULL,  -- year of construction
    HOME_STN TEXT NOT NULL REFERENCES STN (STN_CD)  -- where it is kept
);
CREATE TABLE EMP (  -- staff
    EMP_NO INTEGER PRIMARY KEY,
    LST_NM TEXT NOT NULL,  -- surname
    JOB TEXT NOT NULL,  -- DRV driver, CON conductor
    HIRE_DT TEXT NOT NULL,  -- date of hiring
    BASE_STN TEXT NOT NULL REFERENCES STN (STN_CD)
);
CREATE TABLE TRN (  -- trains that ran, one row a run
    TRN_ID INTEGER PRIMARY KEY,
    LN_NO INTEGER NOT NULL REFERENCES LN (LN_NO),
    RUN_DT TEXT NOT NULL,  -- date, YYYY-MM-DD
    DEP_TM TEXT NOT NULL,  -- departure from the first stop, HH:MM
    VEH_ID INTEGER NOT NULL REFERENCES VEH (VEH_ID),
    DRV_NO INTEGER NOT NULL REFERENCES EMP (EMP_NO),  -- driver
    PAX INTEGER NOT NULL,  -- passengers
    CNCL INTEGER NOT NULL  -- 1 if it was cancelled
);
CREATE TABLE DLY (  -- delays that were noted
    TRN_ID INTEGER NOT NULL REFERENCES TRN (TRN_ID),
    STN_CD TEXT NOT NULL REFERENCES STN (STN_CD),  -- where
    MIN_LATE INTEGER NOT NULL,  -- minutes
    CAUSE TEXT NOT NULL,  -- SIG signals, VEH vehicle, WTH weather, CRW crew
    PRIMARY KEY (TRN_ID, STN_CD)
);
"""

_REGIONS = {
    "North": ("Aldermoor", "Birkhaven", "Coldwater", "Dunmere", "Eastvale"),
    "South": ("Farrow", "Glenbridge", "Hollin Cross", "Ivyford", "Kestrel Bay"),
    "East": ("Larkfield", "Marlow Sands", "Netherby", "Oakhurst", "Pinewick"),
    "West": ("Quarry Hill", "Ravensby", "Stonehythe", "Thornley", "Underwood"),
}
_LINES = (
    (10, "Coast Express", "IC", 6),
    (20, "Moor Express", "IC", 5),
    (31, "Valley Link", "RE", 7),
    (32, "Forest Link", "RE", 7),
    (51, "Harbour Local", "RB", 9),
    (52, "Hill Local", "RB", 8),
)
_MODELS = (("Swift 4", 410), ("Swift 6", 560), ("Badger", 220), ("Wren", 140))
# fmt: off
_SURNAMES = (
    "Abara", "Berg", "Costa", "Dahl", "Egan", "Fontaine", "Grieg", "Haas", "Ito", "Jansen", "Kaur", "Lund", "Moreau", "Novak",
    "Okafor", "Petrov", "Quist", "Rossi", "Silva", "Tanaka",
)
# fmt: on
_DAYS = 28  # from 3 March 2025, a Monday


def make_railway(path: str | Path) -> None:
    """Write the database. InputError where the file exists already or cannot be written."""
    path = Path(path)
    if path.exists():
        raise InputError(f"{path}: exists already; give the name of a new file, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path)
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"{path}: cannot be written ({error})") from None
    try:
        connection.executescript(SCHEMA)
        for table, rows in _rows(random.Random(1825)).items():
            places = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
        connection.commit()
    except sqlite3.Error as error:
        raise InputError(f"{path}: cannot be written ({error})") from None
    finally:
        connection.close()


def _rows(rng: random.Random) -> dict[str, list[tuple]]:
    stations = []
    for region, names in _REGIONS.items():
        for name in names:
            code = name.replace(" ", "")[:3].upper()
            stations.append((code, name, region, rng.choice((2, 2, 3, 4, 6, 8)), rng.randint(1868, 1996)))
    codes = [station[0] for station in stations]
    stops = []
    for number, _, kind, length in _LINES:
        km = 0.0
        for place, code in enumerate(rng.sample(codes, length), start=1):
            stops.append((number, place, code, round(km, 1)))
            km += rng.uniform(22, 48) if kind == "IC" else rng.uniform(5, 19)
    vehicles = [(100 + i, *_MODELS[i % 4], rng.randint(1994, 2023), rng.choice(codes)) for i in range(18)]
    staff = [
        (
            i + 1,
            name,
            "DRV" if i % 5 < 3 else "CON",
            str(date(2001, 1, 8) + timedelta(days=rng.randrange(8500))),
            rng.choice(codes),
        )
        for i, name in enumerate(_SURNAMES)
    ]
    drivers = [row[0] for row in staff if row[2] == "DRV"]
    trains, delays = [], []
    for day in range(_DAYS):
        for number, _, kind, _ in _LINES:
            for hour in (6, 17) if kind == "IC" else (8,):
                train = len(trains) + 1
                vehicle = rng.choice([v for v in vehicles if (v[2] > 300) == (kind == "IC")])
                cancelled = int(rng.random() < 0.05)
                passengers = 0 if cancelled else round(vehicle[2] * rng.uniform(0.15, 0.98))
                when = f"{hour:02d}:{rng.randrange(0, 60, 5):02d}"
                trains.append(
                    (train, number, str(date(2025, 3, 3) + timedelta(days=day)), when, vehicle[0],
                     rng.choice(drivers), passengers, cancelled)
                )  # fmt: skip
                if not cancelled and rng.random() < 0.45:
                    on_line = [stop[2] for stop in stops if stop[0] == number]
                    for code in rng.sample(on_line, rng.choice((1, 1, 2))):
                        cause = rng.choice(("SIG", "SIG", "VEH", "WTH", "CRW"))
                        delays.append((train, code, 2 + int(rng.expovariate(0.12)), cause))
    lines = [line[:3] for line in _LINES]
    return {
        "STN": stations, "LN": lines, "LN_STP": stops, "VEH": vehicles, "EMP": staff, "TRN": trains, "DLY": delays,
    }  # fmt: skip
